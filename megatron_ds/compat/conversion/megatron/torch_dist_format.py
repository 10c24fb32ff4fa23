"""Megatron-LM's `torch_dist` checkpoints: keys of the index → our tensors.

decoder.layers.mlp.linear_fc2.weight      [layers, …]: all layers of one kind in one tensor
decoder.layers.7.mlp.linear_fc2.weight    one layer, where layers differ
optimizer.state.exp_avg.KEY               optimizer state of a weight, in the shape of the weight
optimizer.distributed.dp_group_idx_0.…    flat buffers of the distributed optimizer
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import (
    MASTER,
    WEIGHT,
    LogicalCheckpoint,
    RawCheckpoint,
    StoredProgress,
    StoredTensor,
)
from ..files.tensor_views import StoredBox, changed, joined, stacked
from ..files.torch_dist_folder import (
    Sharded,
    TorchDistFolder,
    is_torch_dist,
    read_torch_dist,
)
from ..formats import Format, Wishes
from ..malformed import refuses_malformed
from .args import check_arguments
from .folder import find_iteration, iteration_folders
from .indexed_optimizer import groups_of
from .model import (
    adam_updates,
    iteration_in,
    logical,
    progress_of,
    with_choices,
)
from .names import IGNORED, TensorPart, is_bert, part_of

NAME = "megatron_torch_dist"
KINDS = {
    "fp32_param": MASTER,
    "param": MASTER,
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*")
_FIRST_GROUP = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_0_1"
)
_STACKED = re.compile(r"((?:encoder|decoder)\.layers)\.([^\d].*)")


def detect(folder: Path) -> bool:
    """Return whether the folder holds a torch_dist checkpoint."""
    return any(is_torch_dist(path) for path in iteration_folders(folder))


@refuses_malformed
def read(folder: Path, wishes: Wishes) -> LogicalCheckpoint:
    """Return the checkpoint of the iteration wanted. Raises CheckpointError."""
    # The arguments describe the model.
    stored = read_torch_dist(find_iteration(folder, wishes.iteration))
    args = fields_of(stored.common.get("args"))
    if not args:
        raise CheckpointError(
            f"{stored.path} records no arguments (args), without which the model is not "
            "known. Megatron-LM saves them; megatron-core alone does not."
        )
    check_arguments(args, stored.path)
    # The keys separate weights, optimizer state by name, and flat buffers.
    kinds = (WEIGHT, MASTER, "exp_avg", "exp_avg_sq")
    keys: dict[str, dict[str, Sharded]] = {kind: {} for kind in kinds}
    buffers = {}
    for key, tensor in stored.tensors.items():
        if _BUFFERS.fullmatch(key):
            buffers[key] = tensor
        elif found := _STATE.fullmatch(key):
            if found[1] not in KINDS:
                raise CheckpointError(
                    f"{stored.path}: the optimizer has the state {found[1]!r}, and Adam "
                    f"has {', '.join(KINDS)}. To load the weights alone, give --no-optim."
                )
            keys[KINDS[found[1]]][found[2]] = tensor
        elif not IGNORED.fullmatch(key):
            keys[WEIGHT][key] = tensor
    # Flat buffers have no names and are cut into parameters.
    bert = is_bert(list(keys[WEIGHT]))
    tensors = {
        kind: _tensors(of_kind, keys[WEIGHT], bert)
        for kind, of_kind in keys.items()
        if of_kind
    }
    if buffers and not wishes.weights_only:
        from .bucketed_optimizer import from_buckets

        tensors |= from_buckets(stored, buffers, tensors[WEIGHT], args)
    # The optimizer's parameter groups hold the values that training used.
    states = _optimizers(stored)
    settings = with_choices(
        args, [group for state in states for group in groups_of(state)]
    )
    raw = RawCheckpoint(
        stored.path, tensors, settings, _progress(stored, args, states), stored.ignored
    )
    return logical(raw, bert, wishes, NAME)


def _tensors(
    keys: Mapping[str, Sharded], weights: Mapping[str, Sharded], bert: bool
) -> dict[str, StoredTensor]:
    """Return the tensors under our names: stacked ones by layer, halves and experts joined."""
    parts: dict[str, dict[TensorPart, StoredTensor]] = {}
    for key, tensor in keys.items():
        tensor = unflattened(tensor, weights[key].shape) if key in weights else tensor
        for name, one in _by_layer(key, tensor):
            part = part_of(name, bert)
            parts.setdefault(part.name, {})[part] = one
    return {name: _joined(name, found) for name, found in parts.items()}


def _by_layer(key: str, tensor: Sharded) -> list[tuple[str, StoredTensor]]:
    found = _STACKED.fullmatch(key)
    if not found:
        return [(key, tensor.whole())]
    return [
        (f"{found[1]}.{layer}.{found[2]}", row)
        for layer, row in enumerate(tensor.rows())
    ]


def _joined(name: str, parts: Mapping[TensorPart, StoredTensor]) -> StoredTensor:
    """Return one tensor of ours from halves and experts. Raises CheckpointError where some are missing."""
    if len(parts) == 1 and next(iter(parts)) == TensorPart(name):
        return parts[TensorPart(name)]
    numbers = sorted({part.expert for part in parts if part.expert is not None})
    experts: list[int | None] = [*numbers] or [None]
    numbers = sorted({part.half for part in parts if part.half is not None})
    halves: list[int | None] = [*numbers] or [None]
    wanted = {TensorPart(name, expert, half) for expert in experts for half in halves}
    if wanted != parts.keys() or experts not in ([None], [*range(len(experts))]):
        raise CheckpointError(
            f"{name}: of its {len(wanted)} parts (experts {experts[:4]}…, halves {halves}) "
            f"{len(parts)} are stored. The checkpoint is incomplete."
        )
    by_expert = [
        joined([parts[TensorPart(name, expert, half)] for half in halves], 0, name)
        for expert in experts
    ]
    return by_expert[0] if experts == [None] else stacked(by_expert, name)


def unflattened(tensor: Sharded, shape: tuple[int, ...]) -> Sharded:
    """Return a tensor of the weight's shape from one whose ranks' shards are stored flat (`flattened_range`).

    A weight of shape [X, Y], cut into shards of [x, y], is then stored as [X/x, Y/y, x·y].
    """
    if tensor.shape == shape or len(tensor.shape) != len(shape) + 1:
        return tensor
    grid = tensor.shape[:-1]
    if any(n == 0 or total % n for total, n in zip(shape, grid)):
        return tensor
    local = tuple(total // n for total, n in zip(shape, grid))

    def regrouped(whole):
        blocks = whole.view(*grid, *local)  # [X/x, Y/y, x, y]
        order: list[int] = []
        for d in range(len(grid)):
            order += [d, len(grid) + d]
        return blocks.permute(order).reshape(shape)

    one = changed(tensor.whole(), shape, regrouped)
    return Sharded(
        tensor.key, shape, tensor.dtype, (StoredBox((0,) * len(shape), one),)
    )


def _optimizers(stored: TorchDistFolder) -> list[dict[str, Any]]:
    """Return the states of the optimizers but their tensors."""
    states = optimizers_in(stored.common.get("optimizer"))
    return states + [
        fields_of(stored.object(key))
        for key in stored.objects
        if _FIRST_GROUP.fullmatch(key)
    ]


def _progress(
    stored: TorchDistFolder, args: Mapping[str, Any], states: list[dict[str, Any]]
) -> StoredProgress:
    steps = []
    for state in states:
        inner = fields_of(state.get("optimizer")) or state
        steps += [
            {"step": fields_of(inner.get("state")).get("common_step")},
            *groups_of(state),
        ]
    scaler = next(
        (
            fields_of(state["grad_scaler"])
            for state in states
            if state.get("grad_scaler")
        ),
        {},
    )
    return progress_of(
        args, iteration_in(stored.common, stored.path), adam_updates(steps), scaler
    )


def optimizers_in(value: Any) -> list[dict[str, Any]]:
    """Return the states of one optimizer, or of several in a list or under numbers."""
    if isinstance(value, list | tuple):
        return [fields_of(one) for one in value]
    found = fields_of(value)
    if found and all(isinstance(key, int) for key in found):
        return [fields_of(one) for one in found.values()]
    return [found] if found else []


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the checkpoint (`megatron/writer.py`)."""
    from .writer import write as written

    return written(checkpoint, folder, wishes)


FORMAT = Format(
    NAME,
    "torch_dist checkpoint of Megatron-LM",
    detect,
    read,
    write,
    reads=("iteration", "vocab_size", "allow_unused"),
    writes=(
        "dtype",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "shard_bytes",
    ),
)
