"""The model of a checkpoint, at the layout of the flags, that does not train: weights without an optimizer."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...checkpoint.load import latest, read_run
from ...cli import Arguments
from ...config import RunConfig, Source, parse
from ...config.sources.flags import canonical, read_flags, spellings
from ...config.sources.reading import Setting, reject
from ...data.tokenizers import Tokenizer
from ...errors import CheckpointError, ConfigError
from ...mpu.agree import on_all_ranks, on_one_rank
from ...mpu.launch_facts import Launch
from ...mpu.mesh import Mesh
from ...planning.replica_plan import plan_replica
from ...planning.run_plan import RULES
from ...registry import did_you_mean
from ...training.base_weights import check_same_base, find_base, load_base
from ...training.build import Replica, build_replica
from ...training.foreign_checkpoints import foreign_checkpoints
from ...training.from_checkpoint import options_of_checkpoint, saved_config
from ...training.run_checkpoint import (
    Start,
    all_pieces,
    check_same_run,
    describe_run,
    find_start,
    load_run,
)
from ...training.run_tokenizer import with_tokenizer
from ..generation.model_text import end_tokens

LOAD = "checkpoint.load"
DTYPES = ("bf16", "fp16")
logger = logging.getLogger(__name__)
# Options of a training: a forward does not read them, but rules need values that fit the layout.
DEFAULTS = {
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1e-4,
    "eval_iters": 0,
    "mock_data": True,
    "finetune": True,
    "no_load_optim": True,
    "skip_train": True,
}


@dataclass(frozen=True)
class LoadedModel:
    """A replica that does not train, its tokenizer, and the iteration of the checkpoint (None: unknown)."""

    replica: Replica
    tokenizer: Tokenizer
    iteration: int | None

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text. Raises DataError."""
        return end_tokens(self.tokenizer, self.replica.config.data)


def own_flags(
    parser: Arguments, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """(the flags of a command, those of the run). Raises ConfigError for a misspelt flag of the command."""
    args, rest = parser.parse_known_args(argv)
    own = parser.flags
    known = spellings()
    for word in rest:
        flag = word.partition("=")[0]
        near = did_you_mean(flag, [*own, *known])
        is_own = any(f"{name!r}?" in near for name in own)
        if flag.startswith("--") and canonical(flag) not in known and is_own:
            raise ConfigError(f"unknown flag {flag}{near} --help lists the flags.")
    return args, rest


def check_flags(rest: Sequence[str]) -> None:
    """Raise ConfigError for flags of the run that are unknown or damaged. They come before contradictions, since a
    misspelt flag may explain these."""
    reject(read_flags(rest).problems)


def evaluation_config(argv: Sequence[str], launch: Launch) -> RunConfig:
    """Return the configuration of these flags, with the model, the dtype and the tokenizer of the --load folder.

    Raises ConfigError with all problems, and CheckpointError for a checkpoint that cannot be read.
    """
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    folder = given.get(LOAD)
    if folder is None:
        raise ConfigError(
            "there is no model: give the folder of a checkpoint with --load."
        )
    # Options of a checkpoint that cannot be read are an error here.
    has_dtype = any(f"optimizer.{name}" in given for name in DTYPES)
    foreign = foreign_checkpoints(folder).defaults(argv, with_dtype=not has_dtype)
    saved = [] if foreign else options_of_checkpoint([*argv, "--use-checkpoint-args"])
    if not foreign and not saved:
        raise CheckpointError(
            f"--load {folder} holds no checkpoint. Give the folder that was --save in training, or one of another "
            "program's checkpoint."
        )
    if saved and not has_dtype:
        saved += _saved_dtype(folder)
    config = parse(
        argv,
        world_size=launch.world_size,
        rules=RULES,
        defaults={**foreign, **DEFAULTS},
        settings=saved,
    )
    _log_dtype(config, has_dtype)
    return config


def _saved_dtype(folder: str) -> list[Setting]:
    """Return the option by which the run in a folder chose its dtype; [] for fp32."""
    step = latest(folder)
    assert step is not None  # options of its checkpoint were read
    optimizer = saved_config(read_run(folder, step), folder).optimizer
    source = Source("script", "the checkpoint")
    return [
        Setting(f"optimizer.{name}", True, source)
        for name in DTYPES
        if getattr(optimizer, name)
    ]


def _log_dtype(config: RunConfig, is_given: bool) -> None:
    for name in DTYPES:
        if getattr(config.optimizer, name) and not is_given:
            logger.info(
                "the model computes in %s, as its checkpoint does: --no-%s for fp32",
                name,
                name,
            )


def load_model(
    as_given: RunConfig, mesh: Mesh, iteration: int | None = None
) -> LoadedModel:
    """Build the model and load its weights. Collective over the world.

    as_given: of `evaluation_config`. iteration: of the checkpoint in the folder of a run; None: the latest. Raises
    CheckpointError and ConfigError on all ranks.
    """
    world = mesh.group("world")
    start = find_start(as_given.checkpoint, world)
    if iteration is not None and start.foreign is not None:
        raise ConfigError(
            f"--iteration {iteration} chooses among the checkpoints of a run, and --load {as_given.checkpoint.load} is "
            "another program's. Remove it."
        )
    if iteration is not None:
        folder = as_given.checkpoint.load
        assert folder is not None  # `evaluation_config` refuses flags without it
        run = on_one_rank(world, lambda: read_run(folder, iteration))
        start = replace(start, step=iteration, run=run)
    config, tokenizer = on_all_ranks(world, lambda: with_tokenizer(as_given))
    return built_and_loaded(config, tokenizer, start, mesh)


def built_and_loaded(
    config: RunConfig, tokenizer: Tokenizer, start: Start, mesh: Mesh
) -> LoadedModel:
    """Return the model of `config`, which has the size of the vocabulary, with the weights of `start`. Collective
    over the world. Raises CheckpointError on all ranks."""
    world = mesh.group("world")
    described = describe_run(config, config, tokenizer, start.run_id)
    if start.step is not None:
        on_all_ranks(
            world, lambda: check_same_run(start.run, described, config.checkpoint)
        )
    base = find_base(config, described, world)
    if start.step is not None:
        on_all_ranks(world, lambda: check_same_base(start.run, base, config))
    of_others = foreign_checkpoints(config.checkpoint.load)
    foreign = on_all_ranks(world, lambda: of_others.read(config, start.foreign))
    # Only weights are loaded: there are no gradients, masters or moments.
    replica = build_replica(config, mesh, plan_replica(config, mesh), trains=False)
    if base is not None:
        load_base(replica, base)
    if foreign is None:
        load_run(replica, start)
    else:
        of_others.load(replica, foreign, all_pieces(replica), config.checkpoint)
    return LoadedModel(replica, tokenizer, start.step)
