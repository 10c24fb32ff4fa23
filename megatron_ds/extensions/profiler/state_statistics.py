"""Numbers about weights and optimizer state over all ranks, for the log: each logical element counts once."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...mpu.collectives import all_reduce_
from ...mpu.host_reads import read_number, read_numbers
from ...mpu.mesh import Mesh
from ...training.moments import Numbers, RunStart
from ...training.observe.memory import memory_tags
from ...training.observer import LAST, Observer
from ...zero.norm import is_counted
from ...zero.optimizer import ZeroOptimizer
from ...zero.state_piece import StatePiece

# Kind of state → its name in Megatron-DeepSpeed's tags.
KINDS = {
    "exp_avg_sq": "variance",
    "exp_avg": "momentum",
    "weight": "weight",
}
TAG_ORDER = (
    "variance",
    "variance_sqrt",
    "momentum",
    "weight",
)


def params_norm(optimizer: ZeroOptimizer, mesh: Mesh) -> float:
    """Return the L2 norm of all weights, of the fp32 masters where there are any. Collective over the world.

    The host waits for the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for piece in _own(optimizer):
        if piece.kind == "weight":
            total += _squares(piece.tensor).to(mesh.device)
    all_reduce_(total, mesh.group("world"))
    return math.sqrt(read_number(total, mesh.group("world")))


@torch.no_grad()
def optimizer_states(optimizer: ZeroOptimizer, mesh: Mesh) -> dict[str, float]:
    """Megatron-DeepSpeed's tags "optimizer/variance_l2" and so on → their values. Collective over the world.

    l2 and l1 are norms of all elements, abs_max is the largest; of the second moment (variance), its root,
    the first moment and the weights. They are 0 for optimizers without these moments.
    """
    # Squares and absolute values of this rank's part, and their maxima, in the order of the tags.
    sums = torch.zeros(2, len(TAG_ORDER), dtype=torch.float64, device=mesh.device)
    largest = torch.zeros(len(TAG_ORDER), dtype=torch.float64, device=mesh.device)
    for piece in _own(optimizer):
        name = KINDS.get(piece.kind)
        if name is None or not piece.tensor.numel():
            continue
        # The second moment counts with its root, too.
        counted = {name: piece.tensor}
        if name == "variance":
            counted["variance_sqrt"] = piece.tensor.sqrt()
        for which, values in counted.items():
            at = TAG_ORDER.index(which)
            sums[0, at] += _squares(values).to(mesh.device)
            sizes = values.abs()
            sums[1, at] += sizes.sum(dtype=torch.float64).to(mesh.device)
            most = sizes.max().double().to(mesh.device)
            largest[at] = torch.maximum(largest[at], most)
    # Sums and maxima over all ranks, which hold different parts of the state.
    all_reduce_(sums, mesh.group("world"))
    all_reduce_(largest, mesh.group("world"), op="max")
    found = torch.cat([sums, largest[None]])
    squares, absolutes, maxima = read_numbers(found, mesh.group("world"))
    # Three tags for each kind.
    tags: dict[str, float] = {}
    for at, name in enumerate(TAG_ORDER):
        tag = f"optimizer/{name}"
        tags[f"{tag}_l2"] = math.sqrt(squares[at])
        tags[f"{tag}_l1"] = absolutes[at]
        tags[f"{tag}_abs_max"] = maxima[at]
    return tags


def _own(optimizer: ZeroOptimizer) -> Iterator[StatePiece]:
    """Yield the pieces that no other rank counts."""
    for piece in optimizer.pieces():
        if piece.replica == 0 and is_counted(piece.spec, optimizer.groups):
            yield piece


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float64, in parts: no float64 copy of a large tensor is made.

    A part fits into the cache of a CPU, and is worth a launch on a GPU.
    """
    elements = 2**16 if values.device.type == "cpu" else 2**22
    parts = values.detach().reshape(-1).split(elements)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum()


class StateNumbers(Observer):
    """Numbers of the weights, of the optimizer's state and of the memory, in each log line."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Keep what they are computed from."""
        self._wanted = start.config.logging
        self._replica = start.replica

    def numbers(self) -> Numbers:
        """Compute what the options ask for. Collective over the world."""
        wanted = self._wanted
        mesh = self._replica.mesh
        optimizer = self._replica.optimizer
        fields: dict[str, Any] = {}
        tags: dict[str, float] = {}
        if wanted.log_params_norm:
            fields["params_norm"] = params_norm(optimizer, mesh)
        if wanted.log_optimizer_states_to_tensorboard:
            tags |= optimizer_states(optimizer, mesh)
        if wanted.log_memory_to_tensorboard:
            tags |= memory_tags(mesh.device)
        if wanted.log_world_size_to_tensorboard:
            tags["world-size"] = mesh.grid.world_size
        return Numbers(fields, tags)
