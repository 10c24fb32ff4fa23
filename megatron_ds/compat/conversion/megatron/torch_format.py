"""Megatron-LM's `torch` checkpoints: files of model-parallel ranks, merged into our tensors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import (
    WEIGHT,
    LogicalCheckpoint,
    RawCheckpoint,
    StoredProgress,
    StoredTensor,
)
from ..files.torch_file import read_torch_file
from ..formats import Format, Wishes
from ..malformed import refuses_malformed
from .args import local_experts
from .flat_buffers import REMEDY, LocalParameter, from_file, is_shared
from .folder import RELEASE, find_iteration, iteration_folders
from .indexed_optimizer import from_indices, groups_of
from .model import (
    UNTRAINED,
    adam_updates,
    iteration_in,
    logical,
    progress_of,
    with_choices,
)
from .names import (
    EMBEDDING,
    HEAD,
    HEAD_COPY,
    TensorPart,
    in_layer,
    is_bert,
    layer_of,
    part_of,
)
from .rank_files import OPTIMIZER_FILE, RankFile, rank_folders, read_rank_files
from .ranks import (
    ByRank,
    expanded_experts,
    merged,
    repacked_qkv,
    with_experts_of,
)
from .torch_dist_format import optimizers_in

NAME = "megatron_torch"
_JOINED_EXPERTS = re.compile(r".*\.mlp\.experts\.weight[12]")
# The parameters of one rank, in the order of registration.
Chunk = list[tuple[TensorPart, StoredTensor]]


def detect(folder: Path) -> bool:
    """Return whether the folder holds mp_rank files."""
    return any(rank_folders(path) for path in iteration_folders(folder))


@refuses_malformed
def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return the checkpoint of the iteration wanted. Raises CheckpointError."""
    # All rank files are opened, and the first has the arguments of the run.
    path = find_iteration(folder, wishes.iteration)
    files = read_rank_files(path)
    args = files[0].args
    if not args:
        raise CheckpointError(
            f"{path} records no arguments (args), without which the model is not known."
        )
    names: list[str] = []
    for file in files:
        names += chain.from_iterable(file.chunks)
    bert = is_bert([name.removeprefix("language_model.") for name in names])
    # Local names become global ones: layers and experts are numbered over all ranks.
    chunks = {
        file.at: [_named(chunk, args, bert) for chunk in file.chunks] for file in files
    }
    offsets = _first_layers(files, chunks)
    kinds: dict[str, dict[TensorPart, ByRank]] = {WEIGHT: {}}
    for file in files:
        placed = [
            _placed(chunk, offsets[file.at[1], number], file, args)
            for number, chunk in enumerate(chunks[file.at])
        ]
        _collect(kinds[WEIGHT], [pair for chunk in placed for pair in chunk], file)
        if path.name != RELEASE and not wishes.weights_only:
            for kind, found in _optimizer(file, placed, args).items():
                _collect(kinds.setdefault(kind, {}), list(found.items()), file)
    # Old versions packed queries, keys and values differently.
    version = files[0].content.get("checkpoint_version") or 0
    if not isinstance(version, int | float):
        raise CheckpointError(
            f"{files[0].folder} has checkpoint_version {version!r}, which is no number. "
            "The file is damaged."
        )
    tensors = {
        kind: merged(_repacked(parts, version, args), args)
        for kind, parts in kinds.items()
        if parts or kind == WEIGHT
    }
    # The optimizer's parameter groups hold the values that training used.
    ignored = tuple(sorted({name for file in files for name in file.ignored}))
    progress = StoredProgress() if path.name == RELEASE else _progress(files[0], args)
    states = optimizers_in(files[0].content.get("optimizer"))
    groups = list(chain.from_iterable(map(groups_of, states)))
    settings = with_choices(args, groups)
    return logical(
        RawCheckpoint(path, tensors, settings, progress, ignored), bert, wishes, NAME
    )


def _named(
    chunk: Mapping[str, StoredTensor], args: Mapping[str, Any], bert: bool
) -> Chunk:
    """Return the parts of ours, numbered as in the file. A tied head has two spellings."""
    experts = local_experts(args)
    pairs: Chunk = []
    for name, tensor in chunk.items():
        part = TensorPart(HEAD) if name == HEAD_COPY else part_of(name, bert)
        pairs += expanded_experts(part, tensor, experts)
    return pairs


def _first_layers(
    files: Sequence[RankFile], chunks: Mapping[tuple, Sequence[Chunk]]
) -> dict:
    """Return (pipeline rank, chunk) → number to add to the layers of its file.

    Layers are numbered from 0 in each chunk of each rank. Chunk c of all ranks comes before chunk c + 1.
    """
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for number, chunk in enumerate(chunks[file.at]):
            layers = {layer_of(part.name) for part, _ in chunk} - {None}
            counts[file.at[1], number] = len(layers)
    offsets = {}
    at = 0
    for stage, number in sorted(counts, key=lambda key: key[::-1]):
        offsets[stage, number] = at
        at += counts[stage, number]
    return offsets


def _placed(chunk: Chunk, first: int, file: RankFile, args: Mapping[str, Any]) -> Chunk:
    """Return the parts of a chunk, renamed with the global numbers of their layers and experts."""
    per_rank = local_experts(args)
    layers = [layer_of(part.name) for part, _ in chunk]
    present = [layer for layer in layers if layer is not None]
    # Some versions number the layers globally already.
    is_local = not present or min(present) == 0
    shift = first if is_local else 0
    placed = []
    for part, tensor in chunk:
        layer = layer_of(part.name)
        name = part.name if layer is None else in_layer(part.name, layer + shift)
        placed.append(
            (with_experts_of(replace(part, name=name), file.at[2], per_rank), tensor)
        )
    return placed


def _collect(found: dict[TensorPart, ByRank], pairs: Chunk, file: RankFile) -> None:
    for part, tensor in pairs:
        by_rank = found.setdefault(part, {})
        at = (file.at[0], file.at[2])
        # Tied embeddings may be on two stages.
        if at in by_rank and part.name not in (
            EMBEDDING,
            HEAD,
        ):
            raise CheckpointError(
                f"{file.folder}: {part.name} is in the files of two pipeline stages, also "
                f"{by_rank[at].place}. The files are mixed up."
            )
        by_rank.setdefault(at, tensor)


def _optimizer(
    file: RankFile, placed: Sequence[Chunk], args: Mapping[str, Any]
) -> dict[str, dict[TensorPart, StoredTensor]]:
    """Return the mapping kind → part → state of this rank's parameters; {} where none was saved."""
    # A file without optimizer has no state, and joined experts have no known layout.
    if file.content.get("optimizer") is None:
        return {}
    names = chain.from_iterable(file.chunks)
    if joined := [name for name in names if _JOINED_EXPERTS.fullmatch(name)]:
        raise CheckpointError(
            f"{file.folder}: the optimizer state of {joined[0]}, in which all experts are "
            f"one parameter, is not read. {REMEDY}"
        )
    # The distributed optimizer stores flat buffers in a file of its own.
    chunks = [
        [
            LocalParameter(part, tensor.shape, tensor.dtype, is_shared(part.name, args))
            for part, tensor in chunk
            if not part.name.endswith(UNTRAINED)
        ]
        for chunk in placed
    ]
    if (file.folder / OPTIMIZER_FILE).is_file():
        content = read_torch_file(file.folder / OPTIMIZER_FILE).content
        return from_file(content, chunks, args, str(file.folder / OPTIMIZER_FILE))
    # Other optimizers store the state by index in the model file.
    states = optimizers_in(file.content["optimizer"])
    if args.get("use_distributed_optimizer"):
        raise CheckpointError(
            f"{file.folder} has no {OPTIMIZER_FILE}, in which the distributed optimizer "
            "keeps its state. Copy it too, or load the weights alone: --no-optim (in "
            "training, --no-load-optim)."
        )
    return from_indices(
        states, [p for chunk in chunks for p in chunk], str(file.folder)
    )


def _repacked(
    parts: Mapping[TensorPart, ByRank], version: float, args: Mapping[str, Any]
) -> dict[TensorPart, ByRank]:
    head_dim = int(
        args.get("kv_channels") or args["hidden_size"] // args["num_attention_heads"]
    )
    return {
        part: {
            at: repacked_qkv(part.name, tensor, version, head_dim)
            for at, tensor in by_rank.items()
        }
        for part, by_rank in parts.items()
    }


def _progress(file: RankFile, args: Mapping[str, Any]) -> StoredProgress:
    states = optimizers_in(file.content.get("optimizer"))
    steps = []
    scaler: dict[str, Any] = {}
    for state in states:
        inner = fields_of(state.get("optimizer")) or state
        steps += [fields_of(group) for group in inner.get("param_groups") or ()]
        steps += [fields_of(one) for one in fields_of(inner.get("state")).values()][:1]
        scaler = scaler or fields_of(state.get("grad_scaler"))
    return progress_of(
        args, iteration_in(file.content, file.folder), adam_updates(steps), scaler
    )


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the weights as a release (`rank_files_writer.py`)."""
    from .rank_files_writer import write_release

    return write_release(checkpoint, folder, wishes)


FORMAT = Format(
    NAME,
    "torch checkpoint of Megatron-LM (mp_rank folders)",
    detect,
    read,
    write,
    reads=("iteration", "vocab_size", "allow_unused"),
    writes=("dtype", "tensor_parallel", "pipeline_parallel"),
)
