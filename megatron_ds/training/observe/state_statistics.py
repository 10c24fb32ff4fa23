"""Numbers about weights and optimizer state over all ranks, for the log: each logical element counts once."""

import math
from collections.abc import Iterable, Iterator

import torch

from ...mpu.collectives import all_reduce_
from ...mpu.host_reads import read_number, read_numbers
from ...mpu.mesh import Mesh
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
# Tag of the most memory that this rank has held.
PEAK = "mem-max-allocated-bytes"


def params_norm(optimizer: ZeroOptimizer, mesh: Mesh) -> float:
    """The L2 norm of all weights, of the fp32 masters where there are any. Collective over the world.

    The host waits for the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for piece in _own(optimizer.pieces(), mesh):
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
    for piece in _own(optimizer.pieces(), mesh):
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
    found = {}
    for at, name in enumerate(TAG_ORDER):
        tag = f"optimizer/{name}"
        found[f"{tag}_l2"] = math.sqrt(squares[at])
        found[f"{tag}_l1"] = absolutes[at]
        found[f"{tag}_abs_max"] = maxima[at]
    return found


def memory_tags(device: torch.device) -> dict[str, float]:
    """Megatron's tags of the memory of this rank, in bytes; on a CPU only the largest resident size."""
    if device.type != "cuda":
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {PEAK: usage.ru_maxrss * 2**10}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        PEAK: stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank ever held: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return memory_tags(device)[PEAK] / 2**30


def _own(pieces: Iterable[StatePiece], mesh: Mesh) -> Iterator[StatePiece]:
    """The pieces that no other rank counts."""
    tp_rank = mesh.coordinate("tp")
    for piece in pieces:
        if piece.replica == 0 and is_counted(piece.spec, tp_rank):
            yield piece


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, float64, in parts: no float64 copy of a large tensor is made.

    A part fits into the cache of a CPU, and is worth a launch on a GPU.
    """
    elements = 2**16 if values.device.type == "cpu" else 2**22
    parts = values.detach().reshape(-1).split(elements)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum()
