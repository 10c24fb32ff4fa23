"""A run that starts from a checkpoint of another program: --load of its folder, at any layout.

options    of the model come from the files, unless flags or a file give them; those must be the same
tokenizer  that of the folder, where it has one and no flag gives another
weights    each rank reads the tensors of its layers and keeps its pieces
state      of the optimizer, and progress, where the files have them; else the run starts at step 0
"""

import logging
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.load import differences
from ...checkpoint.pieces import WEIGHT, Piece
from ...checkpoint.tokenizer_files import FIELDS
from ...config import RunConfig
from ...config.options.model import ModelConfig
from ...config.options.training import CheckpointConfig
from ...config.sources.flags import read_flags
from ...errors import CheckpointError
from ...host.content_hash import content_hash
from ...models.identity import (
    model_identity,
    why_positions_differ,
    with_positions_of,
)
from ...mpu.agree import gather_from_all_ranks, on_all_ranks
from ...mpu.agreement import require_agreement
from ...mpu.group import Group
from ...progress.ramps import Progress
from ...training.build import Replica
from ...training.file_copies import READ_BYTES, copies_of
from ...training.foreign_checkpoints import ForeignCheckpoints
from ...training.found_checkpoints import folder_of_model
from .adapter_tensors import parts_of_name
from .family import model_of
from .files.stored_tensor import AdapterTensors, LogicalCheckpoint, Tensors
from .filling import fill, plan_filling
from .formats import Wishes, detected, format_of
from .own_format import ORIGIN, source_in
from .run_values import progress_in, tokenizer_options, updates_in

logger = logging.getLogger(__name__)
OURS = "megatron_ds"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
BY_NAME = {"bfloat16": "bf16", "float16": "fp16"}
WIDTH = 110


def foreign_format(load: str | None, load_format: str | None) -> str | None:
    """Return the name of the format of the --load folder; None if it is this package's, or holds no checkpoint.

    Reads names of files only. Raises ConfigError for an unknown --load-format.
    """
    if load is None:
        return None
    if load_format is not None:
        name = format_of(load_format).name
        return None if name == OURS else name
    folder = Path(load)
    if not folder.is_dir():
        return None
    try:
        name = detected(folder).name
    except CheckpointError:
        return None
    return None if name == OURS else name


def foreign_defaults(
    argv: Sequence[str], *, with_dtype: bool = False
) -> dict[str, Any]:
    """Return option name → value of the model and the tokenizer in the foreign folder of the --load flag, and of the
    dtype of its weights.

    {} without that flag, also if a --config file has a load. They are defaults: flags and files override
    them, and `check_foreign` names differences. Raises CheckpointError when the folder cannot be read.
    """
    # Only the flags are read here, since the folder provides defaults for the rest.
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    load = folder_of_model(given)
    tokenizer = given.get("data.tokenizer_type")
    name = foreign_format(load, given.get("checkpoint.load_format"))
    if name is None or load is None:
        return {}
    wishes = Wishes(
        vocab_size=given.get("model.vocab_size"),
        weights_only=True,
        qkv_packing=given.get("checkpoint.qkv_packing"),
        base=_base(given.get("checkpoint.pretrained_checkpoint"), load),
        mtp_num_layers=given.get("model.mtp_num_layers"),
    )
    # The folder is read for the options of its model; its tensors stay on disk.
    checkpoint = format_of(name).read(Path(load), wishes)
    # The sequence length defaults to the longest that the model supports.
    options = dict(checkpoint.model)
    data = {}
    rows = options.pop("vocab_size", None)
    options.pop("seq_length", None)
    if given.get("model.seq_length") is None and (
        longest := options.get("max_position_embeddings")
    ):
        options["seq_length"] = longest
    # The tokenizer of the folder is the default, unless one is given.
    if tokenizer is None and not given.get("data.mock_data"):
        found, _ = tokenizer_options(checkpoint)
        data = {
            name: value
            for name in (
                "tokenizer_type",
                "vocab_file",
                "merge_file",
                "tokenizer_model",
            )
            if (value := getattr(found, name))
        }
        tokenizer = found.tokenizer_type
    if rows:  # NullTokenizer adds an end of document
        data["vocab_size"] = (
            rows if tokenizer not in (None, "NullTokenizer") else rows - 1
        )
    return options | data | (dtype_options(checkpoint) if with_dtype else {})


def dtype_options(checkpoint: LogicalCheckpoint) -> dict[str, bool]:
    """Return the option of the dtype that most of the tensors have; {} for fp32.

    Weights that were stored in fewer bits have the dtype that the files state of the model.
    """
    settings = checkpoint.source.get("settings", {})
    if settings.get("quantization_config"):
        stated = settings.get("dtype") or settings.get("torch_dtype")
        return {BY_NAME[stated]: True} if stated in BY_NAME else {}
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors[WEIGHT].values())
    [(dtype, _)] = dtypes.most_common(1)
    return {DTYPES[dtype]: True} if dtype in DTYPES else {}


def read_foreign(config: RunConfig, name: str | None) -> LogicalCheckpoint | None:
    """Read headers and settings of the checkpoint in the --load folder; its tensors are read later. Not collective.

    None without a format. Raises CheckpointError, also if the model is another one than that of the run.
    """
    load = config.checkpoint.load
    if name is None or load is None:
        return None
    without_state = config.checkpoint.finetune or config.checkpoint.no_load_optim
    wishes = Wishes(
        vocab_size=config.model.vocab_size,
        weights_only=without_state,
        qkv_packing=config.checkpoint.qkv_packing,
        base=_base(config.checkpoint.pretrained_checkpoint, load),
        mtp_num_layers=getattr(config.model, "mtp_num_layers", None),
    )
    found = format_of(name).read(Path(load), wishes)
    check_foreign(found, config.model, config.checkpoint.finetune)
    _check_adapters(found, config)
    return found


def _base(pretrained: str | None, load: str) -> Path | None:
    """Return the folder of the weights below the adapters in --load."""
    return None if pretrained is None or pretrained == load else Path(pretrained)


def check_foreign(
    found: LogicalCheckpoint, model: ModelConfig, finetune: bool = False
) -> None:
    """Raises CheckpointError naming every option in which the files and the run differ.

    finetune: positions may differ, where weights do not depend on them
    """
    theirs = model_identity(model_of(found.model, found.folder))
    ours = model_identity(model)
    if differing := differences(
        with_positions_of(ours, theirs) if finetune else theirs, ours
    ):
        words = ""
        if ours["vocab_size"] > theirs["vocab_size"]:
            words = " The tokenizer has more tokens than the model has rows: it is that of another model."
        raise CheckpointError(
            f"--load {found.folder} holds another model: {'; '.join(differing)}. Omit the "
            "flags of these options to take their values from the files."
            f"{words}{why_positions_differ(ours, theirs)}"
        )


def load_foreign(
    replica: Replica,
    found: LogicalCheckpoint,
    pieces: Sequence[Piece],
    checkpoint: CheckpointConfig,
) -> Progress:
    """Fill weights, and optimizer state where both have it. Returns the progress. Collective over the world.

    checkpoint: the options of this load

    Raises the same CheckpointError on all ranks.
    """
    # Optimizer state is loaded if both the folder and the run have it.
    mesh = replica.mesh
    begin = time.perf_counter()
    doing = f"cannot load {found.folder}"
    weights_only = (
        checkpoint.finetune or checkpoint.no_load_optim or found.optimizer is None
    )
    if not weights_only:
        _check_optimizer(found, replica.config.optimizer.optimizer)
    kinds = (WEIGHT,) if weights_only else None
    _require_same_weights(found, mesh.group("world"))
    # Each rank plans its reads first, so that missing tensors stop all ranks together.
    plans = []
    gather_from_all_ranks(
        mesh.group("world"),
        lambda: plans.append(plan_filling(pieces, _tensors(found), kinds)),
        doing=doing,
        kind=CheckpointError,
    )
    on_all_ranks(
        mesh.group("world"),
        lambda: fill(plans[0], mesh.coordinates),
        doing=doing,
        kind=CheckpointError,
    )
    # The optimizer's own numbers, its step and its scale, follow the tensors.
    if not weights_only:
        replica.optimizer.load_extra_state(
            _numbers(found, replica.optimizer.extra_state())
        )
    replica.optimizer.after_load()
    # Fine-tuning, or a folder without progress, starts at step 0.
    starts_anew = checkpoint.finetune or found.progress.iteration is None
    progress = Progress() if starts_anew else progress_in(found.progress)
    if mesh.rank == 0:
        if found.notes:
            logger.info("%s", notes_text(found))
        what = "weights only" if weights_only else "weights and optimizer"
        logger.info(
            "loaded %s, a %s, %s, at iteration %d, in %.1f s",
            found.folder,
            format_of(found.source.get("format", OURS)).noun
            if found.source
            else "checkpoint",
            what,
            progress.step,
            time.perf_counter() - begin,
        )
    return progress


def _require_same_weights(found: LogicalCheckpoint, world: Group) -> None:
    """Raise ConfigError on all ranks if the copies of the folder on some ranks hold other tensors. Collective over
    the world."""
    if world.size == 1:
        return
    files = on_all_ranks(world, lambda: _files_in(found.folder))
    if len(set(copies_of(files, world))) == 1:
        return
    require_agreement(
        world,
        lambda: _hashes_of_tensors(found),
        "the ranks of this job load different weights",
        "They would train a mixture of both. Copy the same folder to all machines.",
    )


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the name of each file of a folder → its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths}


def _hashes_of_tensors(found: LogicalCheckpoint) -> dict[str, tuple[str, str]]:
    """Return the name of each tensor → (shape, dtype and hash, place). If all tensors exceed READ_BYTES, only
    evenly spaced ones are hashed."""
    stored = {}
    for kind, tensors in _tensors(found).items():
        for name in sorted(tensors):
            stored[f"{kind}/{name}"] = tensors[name]
    total = sum(tensor.nbytes for tensor in stored.values())
    hashed = set(list(stored)[:: max(1, -(-total // READ_BYTES))])
    facts = {}
    for name, tensor in stored.items():
        value = f"{list(tensor.shape)} {tensor.dtype}"
        if name in hashed:
            content = tensor.read().contiguous().view(-1).view(torch.uint8)
            value += f", hash {content_hash([content.numpy()])[:16]}"
        facts[name] = (value, tensor.place)
    return facts


def _tensors(found: LogicalCheckpoint) -> Tensors:
    """Return the tensors of the files, and adapters, which a run with adapters loads in place of the weights."""
    if found.adapters is None:
        return found.tensors
    weights = {**found.tensors[WEIGHT], **found.adapters.tensors}
    return {**found.tensors, WEIGHT: weights}


def _check_adapters(found: LogicalCheckpoint, config: RunConfig) -> None:
    """Raises CheckpointError if a run with adapters loads others, or none."""
    added = config.added_weights
    if added is None or not config.checkpoint.load:
        return
    if config.checkpoint.load == config.checkpoint.pretrained_checkpoint:
        return  # the frozen weights
    adapters = found.adapters
    if adapters is None:
        raise CheckpointError(
            f"--load {config.checkpoint.load} holds the weights of a whole model, and a run with --lora-rank loads "
            f"adapters. Give --pretrained-checkpoint {config.checkpoint.load} in place of --load."
        )
    theirs = {
        "rank": adapters.rank,
        "scale": adapters.scale,
        "targets": sorted(adapters.targets),
    }
    if adapters.has_magnitudes:
        theirs["dora"] = True
    if differing := differences(theirs, added.identity):
        raise CheckpointError(
            f"--load {config.checkpoint.load} holds other adapters: {'; '.join(differing)}. Give "
            "--lora-rank, --lora-alpha, --lora-target-modules and --use-dora of these."
        )
    _check_all_layers(found, adapters)


def _check_all_layers(found: LogicalCheckpoint, adapters: AdapterTensors) -> None:
    """Raises CheckpointError if some layers of the adapted kinds have no adapter: a run would give all of them
    one."""
    tensors = adapters.tensors.items()
    adapted = {parts_of_name(name, tensor.place)[0] for name, tensor in tensors}
    kinds = {layer.rpartition(".")[2] for layer in adapted}
    layers = {name.removesuffix(".weight") for name in found.tensors[WEIGHT]}
    alike = {layer for layer in layers if layer.rpartition(".")[2] in kinds}
    if absent := sorted(alike - adapted):
        raise CheckpointError(
            f"--load {found.folder} holds adapters of {len(adapted)} of {len(alike)} layers of these kinds, and a run "
            f"gives all of them one; {absent[0]} has none. Add the adapters to the weights with megatron-ds "
            "merge-adapter, and train new ones beside the sum with --pretrained-checkpoint."
        )


def origin_of(
    run: Mapping, found: LogicalCheckpoint | None, config: RunConfig
) -> dict[str, Any]:
    """Return an entry for run.json: the format, family and settings that an export is to have again; {} if unknown.

    run: the run.json of the checkpoint that is continued; found: the checkpoint of another program. Ids of
    special tokens are left out where the run has another tokenizer than the folder.
    """
    source = dict(found.source) if found is not None else source_in(run)
    if "family" not in source:
        return {}
    files = [
        Path(path).resolve() for name in FIELDS if (path := getattr(config.data, name))
    ]
    folder = Path(config.checkpoint.load or "").resolve()
    if found is not None and any(folder not in (path, *path.parents) for path in files):
        source.pop("generation", None)
        source["settings"] = {
            name: value
            for name, value in source.get("settings", {}).items()
            if not name.endswith("_token_id")
        }
    return {ORIGIN: source}


def log_length(config: RunConfig) -> None:
    """Log the length of sequences if it is that of the --load folder."""
    source = config.sources.get("model.seq_length")
    if source is not None and source.kind == "script":
        logger.info(
            "--seq-length is %d, the number of positions in %s: no flag or file gives it",
            config.model.seq_length,
            config.checkpoint.load,
        )


def notes_text(found: LogicalCheckpoint) -> str:
    """Return a paragraph for each setting of the source that the run does not follow, or follows in another way."""
    lines = [
        textwrap.fill(
            note,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for note in found.notes
    ]
    return "\n".join((f"settings of {found.folder} that differ in this run:", *lines))


def _check_optimizer(found: LogicalCheckpoint, ours: str) -> None:
    if found.optimizer != ours:
        raise CheckpointError(
            f"--load {found.folder} holds the state of --optimizer {found.optimizer}, "
            f"which --optimizer {ours} cannot use. Use --optimizer {found.optimizer}, or "
            f"give --no-load-optim to start {ours} without state."
        )


def _numbers(
    found: LogicalCheckpoint, current: Mapping[str, float]
) -> dict[str, float]:
    """Return the numbers of the optimizer from the files; those that the files lack are the ones of this run."""
    known = {
        name: value for name, value in found.progress.scaler.items() if name in current
    }
    return {**current, **known, "num_updates": updates_in(found.progress)}


class FormatsOfOthers(ForeignCheckpoints):
    """The formats of this package's tables, for `pretrain`."""

    format_of_folder = staticmethod(foreign_format)
    defaults = staticmethod(foreign_defaults)
    log_length = staticmethod(log_length)
    read = staticmethod(read_foreign)
    origin_of = staticmethod(origin_of)
    load = staticmethod(load_foreign)


CHECKPOINTS = FormatsOfOthers()
