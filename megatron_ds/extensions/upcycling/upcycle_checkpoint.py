"""Make a checkpoint of a model with experts from one of a dense model (upcycling).

    megatron-ds upcycle --load runs/dense --save runs/experts --num-experts 8 \\
        --moe-router-topk 2
    megatron-ds upcycle --load runs/dense --save runs/fine --num-experts 16 \\
        --moe-router-topk 4 --moe-upcycling-granularity 2

Each expert is a copy of the feed-forward of its layer, or one of G parts of its width, and the router is new.
With softmax over the chosen experts (the default), or with several normalized sigmoids, and without a
capacity, the model computes what the dense one did; the last line printed states whether it does. Train it
with pretrain_gpt.py --load DIR --finetune, or with --no-load-optim to keep the iteration and the place in the
data.

All flags of pretrain_gpt.py that describe experts and routers are accepted (see below); flags that change
anything else of the model are refused. One tensor is in memory at a time.
"""

import argparse
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from megatron_ds import __version__
from megatron_ds.checkpoint.disk_space import check_room
from megatron_ds.checkpoint.folder import RUN_FILE, check_writable
from megatron_ds.checkpoint.load import (
    check_same_model,
    find_checkpoint,
    latest,
    read_run,
)
from megatron_ds.checkpoint.lock import locked
from megatron_ds.checkpoint.pieces import WEIGHT
from megatron_ds.checkpoint.run_file import require, require_whole_model
from megatron_ds.checkpoint.save import save
from megatron_ds.checkpoint.save_folder import check_vacant
from megatron_ds.checkpoint.tokenizer_files import KEY as TOKENIZER_FILES
from megatron_ds.checkpoint.tokenizer_files import named_copies
from megatron_ds.checkpoint.whole_tensors import StoredTensors
from megatron_ds.cli import Arguments
from megatron_ds.config import RunConfig, Source, parse
from megatron_ds.config.options.moe import MoEOptions
from megatron_ds.config.run import options_in
from megatron_ds.config.saved_values import to_dict
from megatron_ds.config.sources.config_text import explanation, invocation
from megatron_ds.config.sources.flags import CONFIG_FLAG
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.extensions.upcycling.upcycling import Upcycling, counted, is_exact
from megatron_ds.models.identity import MOE_FIELDS, model_identity
from megatron_ds.mpu.group import solo
from megatron_ds.planning.run_plan import RULES
from megatron_ds.training.pretrain import KNOWN_NAMES


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the tool itself; all others are those of the training."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # Flags that name the two folders.
    add(
        "--load",
        type=Path,
        required=True,
        help="checkpoint folder of the dense run (its --save)",
    )
    add(
        "--save",
        type=Path,
        required=True,
        help="folder for the new checkpoint, which holds no other run",
    )
    add(
        "--iteration", type=int, help="which checkpoint of --load (default: the latest)"
    )
    add(
        "--moe-upcycling-granularity",
        type=int,
        default=1,
        metavar="G",
        help="cut the width of the feed-forward into G parts, each of which is an expert (default 1). G "
        "divides the number of experts and --moe-router-topk",
    )
    # The help also lists the options of experts, which training shares.
    options = [
        f"  {invocation(option)}\n      {explanation(option)}"
        for option in options_in("model")
        if option.name in {field.name for field in fields(MoEOptions)}
    ]
    parser.epilog = "\n".join(["experts and routers, as in training:", *options])
    return parser


def main(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """flags: those of training."""
    check_writable(args.save)
    with locked(args.save, solo()):
        run_id = secrets.token_hex(4)
        step = find_step(args)
        advice = f"Give an empty folder, or delete what is in {args.save}"
        check_vacant(args.save, run_id, 0, advice, advice)
        run = read_run(args.load, step)
        check_dense(run, args.load)
        require_whole_model(run, args.load)
        config = config_with_experts(args, flags, run, step)
        model = config.with_values(
            {"model.vocab_size": run["identity"]["model"]["vocab_size"]},
            Source("derived", "the checkpoint"),
        ).model
        identity = model_identity(model)
        check_rest(run["identity"]["model"], identity, args.load)
        upcycling = Upcycling(model, config.train.seed, args.moe_upcycling_granularity)
        upcycling.check()
        write(args, upcycling, step, new_run(run, run_id, config, identity, args))
    return 0


def find_step(args: argparse.Namespace) -> int:
    """Return the iteration to read: --iteration, or the latest. Raises CheckpointError."""
    step = args.iteration if args.iteration is not None else latest(args.load)
    if step is None:
        raise CheckpointError(
            f"--load {args.load}: no complete checkpoint there. Give the folder that was "
            "--save in the training of the dense model."
        )
    return step


def check_dense(run: Mapping, directory: Path) -> None:
    """Raise CheckpointError for a checkpoint that has experts or no options."""
    if "engine" in run:
        raise CheckpointError(
            f"--load {directory} was saved by an engine (megatron_ds.initialize), whose "
            "modules are not known. Give a checkpoint of pretrain_gpt.py or "
            "pretrain_bert.py."
        )
    require(
        run,
        directory,
        "identity.model.vocab_size",
        "identity.tokenizer",
        "identity.data",
        "config",
        "progress",
        "world_size",
    )
    if "experts" in run["identity"]["model"]:
        raise CheckpointError(
            f"--load {directory} has experts already, "
            f"{run['identity']['model']['experts']} in its layers. Give a checkpoint of a "
            "dense model."
        )


def config_with_experts(
    args: argparse.Namespace, flags: Sequence[str], run: Mapping, step: int
) -> RunConfig:
    """Return the configuration of the dense run with `flags`, checked by all rules of training."""
    file = find_checkpoint(args.load, step) / RUN_FILE
    width = run["identity"]["model"]["ffn_size"]
    parts = args.moe_upcycling_granularity
    if parts < 1:
        raise ConfigError(
            f"--moe-upcycling-granularity {parts} is not a number of parts. Use 1 for whole "
            "copies."
        )
    if parts > 1 and not any(
        flag.startswith("--moe-ffn-hidden-size") for flag in flags
    ):
        flags = [*flags, "--moe-ffn-hidden-size", str(width // parts)]
    config = parse(
        [CONFIG_FLAG, str(file), *flags],
        world_size=run["world_size"],
        known=KNOWN_NAMES,
        rules=RULES,
    )
    # The new run.json, used as --config, trains the new model.
    start = {
        "checkpoint.load": str(args.save),
        "checkpoint.save": None,
        "checkpoint.finetune": True,
        "checkpoint.overwrite_save": False,
    }
    return config.with_values(start, Source("derived", "upcycling"))


def check_rest(dense: Mapping, model: Mapping, directory: Path) -> None:
    """Raises CheckpointError if a flag changes more of the model than its experts."""
    rest = {
        name: value
        for name, value in model.items()
        if name not in ("experts", *MOE_FIELDS)
    }
    try:
        check_same_model({"model": dense}, {"model": rest})
    except CheckpointError as error:
        raise CheckpointError(
            f"--load {directory}: only experts and routers can be added. {error}"
        ) from None


def new_run(
    run: Mapping,
    run_id: str,
    config: RunConfig,
    identity: Mapping,
    args: argparse.Namespace,
) -> dict:
    """run.json of the new checkpoint. Progress is that of the dense run; there is no optimizer state."""
    made_of = {
        "load": str(args.load),
        "step": run["step"],
        "run_id": run.get("run_id"),
        "granularity": args.moe_upcycling_granularity,
    }
    return {
        "version": __version__,
        "run_id": run_id,
        "identity": {**run["identity"], "model": identity},
        "config": to_dict(config),
        "world_size": run["world_size"],
        "progress": run["progress"],
        "optimizer": {"num_updates": 0},
        "upcycled_from": made_of,
        **{name: run[name] for name in (TOKENIZER_FILES,) if name in run},
    }


def write(
    args: argparse.Namespace, upcycling: Upcycling, step: int, run: Mapping
) -> None:
    """Write the checkpoint with experts."""
    # The model is larger than the dense one, so the disk is checked first.
    pieces = upcycling.pieces(StoredTensors(args.load, step, (WEIGHT,)))
    check_room(args.save, pieces, coordinates={}, world=solo(), saves=1, limit=None)
    # run.json names the copies of the tokenizer by paths in the folder.
    copies = named_copies(args.load, run).values()
    for name in {Path(copy).parts[0] for copy in copies}:
        if (args.load / name).is_dir():
            shutil.copytree(args.load / name, args.save / name, dirs_exist_ok=True)
    # Weights are made while they are written, so the bar counts the bytes made.
    with progress(sum(piece.tensor.nbytes for piece in pieces)) as done:
        path = save(
            args.save,
            step,
            counted(pieces, done),
            coordinates={},
            world=solo(),
            run=run,
        )
    # A router that treats experts unlike each other changes the loss, which the user should know.
    model = upcycling.model
    added = sum(upcycling.model.experts)
    print(
        f"wrote {path}: {added} experts in {sum(map(bool, model.experts))} of {model.num_layers} layers"
    )
    print(
        "the model computes what the dense one did"
        if is_exact(model, upcycling.granularity)
        else "the model computes what the dense one did only where the router scores all experts alike and no "
        "token is dropped"
    )
    print(
        f"to train it: pretrain_{model.model}.py {CONFIG_FLAG} {shlex.quote(str(path / RUN_FILE))} --save "
        "DIR"
    )


@contextmanager
def progress(total: int):
    """A bar of bytes on a terminal; yields the function that advances it."""
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="writing",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    args, flags = make_parser().parse_known_args(argv)
    return main(args, flags)
