"""Checkpoints of this package as a source and a target of conversions.

    read     run.json → options; each tensor of the index is read when it is used
    write    as a training run saves: complete or invisible, with checksums; `--load` continues from it

run.json of a converted checkpoint has "converted_from" with format, family and settings of the source. It
has no identity of data: the source does not record it as this package does. That of a run which started from
such a checkpoint, or from the folder of another program, has the same values as "trained_from".
"""

import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...checkpoint import folder as folders
from ...checkpoint.disk_space import check_room
from ...checkpoint.load import find_checkpoint, latest, read_run
from ...checkpoint.lock import locked
from ...checkpoint.pieces import MadePiece
from ...checkpoint.run_file import progress_of, require
from ...checkpoint.save import save
from ...checkpoint.save_folder import TOKENIZERS as TOKENIZER_COPIES
from ...checkpoint.save_folder import saved_run_in
from ...checkpoint.tokenizer_files import (
    ENDS,
    MODEL,
    keep_tokenizer_files,
    named_copies,
)
from ...checkpoint.whole_tensors import StoredTensors
from ...config import CheckpointConfig, RunConfig, Source
from ...config.options.model import ModelConfig
from ...config.saved_values import from_dict, to_dict
from ...data.tokenizers import build_tokenizer
from ...errors import CheckpointError, ConfigError, DataError
from ...features import sections_without_features
from ...models.identity import model_identity
from ...models.specs import specs_of
from ...mpu.group import solo
from ...mpu.param_spec import Init, ParamSpec
from .adapter_tensors import with_adapters
from .family import listing, model_of
from .files.read_ahead import ReadAhead
from .files.stored_tensor import (
    WEIGHT,
    AdapterTensors,
    LogicalCheckpoint,
    StoredProgress,
    StoredTensor,
)
from .formats import Format, Wishes, detected
from .published import unwritten
from .run_values import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZERS,
    progress_in,
    tokenizer_options,
    updates_in,
)

NAME = "megatron_ds"
SOURCE = "converted_from"
ORIGIN = "trained_from"


# ------------------------------------------------------------------ reading
def detect(folder: Path) -> bool:
    """Return whether a checkpoint in the folder was written by this package."""
    return any(
        folders.is_ours(path)
        for step in folders.steps_in(folder)
        if (path := folders.find(folder, step)) is not None
    )


def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return the checkpoint of `wishes.iteration`, or the latest; one of adapters with the weights below them.

    Raises CheckpointError.
    """
    from ...checkpoint.index import read_index

    # run.json records the configuration and the model.
    step = wishes.iteration if wishes.iteration is not None else latest(folder)
    if step is None:
        raise CheckpointError(
            f"{folder}: no complete checkpoint there. Give the folder that was --save in "
            "training."
        )
    run = read_run(folder, step)
    if "engine" in run:
        raise CheckpointError(
            f"{folder} was saved by an engine (megatron_ds.initialize), whose module is "
            "not known. Export its tensors with megatron-ds export."
        )
    require(run, folder, "config", "identity.model.vocab_size", "progress")
    left_out = sections_without_features(run, str(folder))
    config = from_dict(run["config"], left_out)
    model = replace(config.model, vocab_size=run["identity"]["model"]["vocab_size"])
    # The index lists the kinds of tensors that were saved.
    index = read_index(find_checkpoint(folder, step))
    kinds = {key.partition("/")[0] for key in index.state_dict_metadata}
    tensors = {
        kind: _stored(folder, step, kind)
        for kind in kinds
        if kind == WEIGHT or not wishes.weights_only
    }
    # Training options are kept if the run set them.
    if "adapters" in run["identity"]:
        return _with_base(folder, run, tensors[WEIGHT], wishes)
    has_state = len(tensors) > 1
    training = {
        path: config.get(path)
        for path in config.sources
        if path.partition(".")[0] in ("optimizer", "train")
    }
    return LogicalCheckpoint(
        folder,
        options_of(model),
        tensors,
        _progress(run),
        config.optimizer.optimizer if has_state else None,
        training,
        _tokenizer_files(folder, run, config),
        source=source_in(run),
        tokenizer_type=config.data.tokenizer_type,
    )


def _with_base(
    folder: Path, run: Mapping, adapters: Mapping[str, StoredTensor], wishes: Wishes
) -> LogicalCheckpoint:
    """Return the model of a run with adapters: its frozen weights, and the adapters in the folder."""
    require(run, folder, "identity.adapters.rank", "identity.adapters.scale")
    named = run.get("base", {}).get("folder")
    base = wishes.base or (named and Path(named))
    if not base or not base.is_dir():
        raise CheckpointError(
            f"{folder} holds adapters, which were trained beside the weights in {named or 'no folder'}: that is not "
            "there. Give the folder of these weights with --base."
        )
    about = run["identity"]["adapters"]
    step = run.get("base", {}).get("step")
    format = detected(base)
    found = format.read(base, replace(wishes, iteration=step, weights_only=True))
    specs = {spec.name: spec for spec in specs_of(model_of(found.model, base))}
    own = {name: t for name, t in adapters.items() if name not in specs}
    # The training of the adapters has changed what routers remember.
    remembered = {name: t for name, t in adapters.items() if name in specs}
    tensors = AdapterTensors(
        own,
        about["rank"],
        about["scale"],
        tuple(about.get("targets", ())),
        base,
        remembered,
    )
    whole = with_adapters(found, tensors, specs, folder)
    weights = {**whole.tensors[WEIGHT], **remembered}
    return replace(whole, tensors={WEIGHT: weights})


def source_in(run: Mapping) -> dict[str, Any]:
    """Format, family and settings of the checkpoint that the weights in a run came from; {} if none is known.

    Raises CheckpointError for other contents, which only a damaged run.json has.
    """
    found = run.get(SOURCE) or run.get(ORIGIN) or {}
    tables = (
        [found, *(found.get(name) or {} for name in ("settings", "generation"))]
        if isinstance(found, Mapping)
        else [found]
    )
    if not all(isinstance(table, Mapping) for table in tables):
        name = SOURCE if run.get(SOURCE) else ORIGIN
        raise CheckpointError(
            f"run.json is damaged: {name} is not a table of settings."
        )
    return dict(found)


def options_of(model: ModelConfig) -> dict[str, Any]:
    """Return the options of a model that are not at their defaults."""
    values = {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
    return {
        name: value
        for name, value in values.items()
        if value != getattr(ModelConfig, name)
    }


def _stored(folder: Path, step: int, kind: str) -> dict[str, StoredTensor]:
    stored = StoredTensors(folder, step, (kind,))
    place = find_checkpoint(folder, step)
    return {
        entry.name: StoredTensor(
            tuple(entry.shape),
            entry.dtype,
            partial(stored.read, entry),
            f"{place}: {kind}/{entry.name}",
        )
        for entry in stored.entries
    }


def _progress(run: Mapping) -> StoredProgress:
    progress = progress_of(run)
    numbers = dict(run.get("optimizer", {}))
    updates = numbers.pop("num_updates", None)
    return StoredProgress(
        progress.step,
        progress.samples,
        progress.tokens,
        progress.skipped_steps,
        updates,
        numbers,
    )


def _tokenizer_files(folder: Path, run: Mapping, config: RunConfig) -> dict[str, Path]:
    """Return the mapping names in a Hugging Face folder → the copies beside the checkpoint; {} without copies."""
    copies = {field: folder / path for field, path in named_copies(folder, run).items()}
    names = next(
        (names for kind, names in TOKENIZERS if kind == config.data.tokenizer_type), {}
    )
    found: dict[str, Path] = {}
    for field, path in copies.items():
        if path.is_dir():
            found |= {
                file.name: file for file in sorted(path.iterdir()) if file.is_file()
            }
        elif field in names:
            found[names[field]] = path
            found |= {
                name: path.with_name(name)
                for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, *ENDS)
            }
    # The target writes its own settings of the model.
    found.pop(MODEL, None)
    return {name: path for name, path in found.items() if path.is_file()}


# ------------------------------------------------------------------ writing
def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write a checkpoint in `folder`, which must hold no other run. Raises CheckpointError."""
    # Nothing is written for a dtype or a folder that cannot be used.
    model = model_of(checkpoint.model, checkpoint.folder)
    if wishes.dtype not in (None, "float32"):
        raise CheckpointError(
            f"--dtype {wishes.dtype}: checkpoints of this package hold weights in float32, "
            "from which the optimizer continues. Omit it."
        )
    with _made(folder), locked(folder, solo()), _vacant(folder):
        # Each tensor becomes one piece of a single-process save.
        specs = {spec.name: spec for spec in specs_of(model)}
        kinds = (WEIGHT, *sorted(checkpoint.tensors.keys() - {WEIGHT}))
        items: list[tuple[str, str, StoredTensor]] = []
        for kind in kinds:
            named = checkpoint.tensors[kind]
            items += [(kind, name, tensor) for name, tensor in named.items()]
        if odd := [name for _, name, _ in items if name not in specs]:
            raise CheckpointError(
                f"{checkpoint.folder}: the model has no tensor {listing(odd)}."
            )
        pieces = [_piece(specs[name], kind, tensor) for kind, name, tensor in items]
        check_room(folder, pieces, coordinates={}, world=solo(), saves=1, limit=None)
        lines, run, config = run_of(checkpoint, model, folder, secrets.token_hex(4))
        # Tensors are read ahead while earlier ones are written.
        with ReadAhead(
            [tensor for *_, tensor in items], [torch.float32] * len(items), wishes.done
        ) as ahead:
            made = [
                replace(piece, make=partial(ahead.take, index))
                for index, piece in enumerate(pieces)
            ]
            path = save(
                folder,
                run["progress"]["step"],
                made,
                coordinates={},
                world=solo(),
                run=run,
            )
    kept = f", with {', '.join(kinds[1:])}" if len(kinds) > 1 else ", weights only"
    size = sum(piece.tensor.nbytes for piece in pieces) / 2**20
    return [f"wrote {path}: {len(items)} tensors, {size:.1f} MiB{kept}", *lines]


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make the folder for the block. A new folder that the block leaves empty because of an error is removed.
    Raises CheckpointError."""
    is_new = not folder.exists()
    try:
        folders.make(folder)
        folders.probe(folder, 1)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(unwritten(folder, reason)) from error
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _vacant(folder: Path) -> Iterator[None]:
    """Let the block write a checkpoint into a folder without a run; after an error nothing of it is left. Raises
    CheckpointError if the folder holds a run."""
    there = saved_run_in(folder)
    if there is not None:
        raise CheckpointError(
            f"--save {folder} holds {there}: a conversion does not mix its files with others. Give a new folder, or "
            "delete this one."
        )
    try:
        yield
    except BaseException:
        for path in (*folder.glob(TOKENIZER_COPIES), *folder.glob(".iter_*")):
            shutil.rmtree(path, ignore_errors=True)
        raise


def _piece(spec: ParamSpec, kind: str, tensor: StoredTensor) -> MadePiece:
    """Return the piece of a whole tensor. Its shape may differ from the weight's: 1-bit LAMB keeps one number for
    each parameter."""
    shape = (1,) if tuple(tensor.shape) == (1,) else spec.shape
    blank = torch.empty(math.prod(shape), device="meta")
    return MadePiece(
        ParamSpec(spec.name, shape, Init("zeros")), blank, tensor.read, kind=kind
    )


def run_of(
    checkpoint: LogicalCheckpoint, model: ModelConfig, folder: Path, run_id: str
) -> tuple[list[str], dict[str, Any], RunConfig]:
    """Return the lines for the user, run.json, and the configuration in it."""
    # The configuration starts from the model, the tokenizer and the stored training options.
    finetunes = checkpoint.optimizer is None
    data, lines = tokenizer_options(checkpoint)
    start = CheckpointConfig(save=str(folder), load=str(folder), finetune=finetunes)
    config = RunConfig(model=model, data=data, checkpoint=start)
    if checkpoint.training:
        config = config.with_values(
            checkpoint.training, Source("derived", str(checkpoint.folder))
        )
    # A tokenizer that cannot be built is reported, and training then needs flags of one.
    identity: dict[str, Any] = {"model": model_identity(model)}
    entry = {}
    try:
        if data.tokenizer_type is not None:
            tokenizer = build_tokenizer(data, model)
            identity["tokenizer"] = {"fingerprint": tokenizer.fingerprint}
            entry = keep_tokenizer_files(config)
    except (ConfigError, DataError) as error:
        lines.append(f"no tokenizer is kept: {error}")
    # The run continues from the stored progress; `save` is chosen when it is trained.
    progress = progress_in(checkpoint.progress)
    config = replace(config, checkpoint=replace(start, save=None))
    run = {
        "version": __version__,
        "run_id": run_id,
        "identity": identity,
        "config": to_dict(config),
        "world_size": 1,
        "progress": progress.to_dict(),
        "optimizer": {
            "num_updates": updates_in(checkpoint.progress),
            **checkpoint.progress.scaler,
        },
        SOURCE: dict(checkpoint.source) or {"folder": str(checkpoint.folder)},
        **entry,
    }
    lines.append(
        f"to train it: pretrain_{model.model}.py --config "
        f"{folder / folders.name_of(progress.step) / folders.RUN_FILE} with the flags of training"
    )
    return lines, run, config


FORMAT = Format(
    NAME,
    "checkpoint of this package",
    detect,
    read,
    write,
    reads=("iteration", "base"),
    writes=("dtype",),
)
