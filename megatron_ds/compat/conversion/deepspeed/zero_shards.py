"""Parameters, masters and moments of ZeRO, merged over the data-parallel ranks that hold a shard each.

Stages 1 and 2 cut the concatenation of all parameters of a group into equal parts; a parameter may continue
on the next rank. Each file records the slices of its rank, {name: (start, number of elements)}:

    group    |     w 6     | b 3 |  v 5   | padding 2        two ranks, 8 elements each
    rank 0   |w w w w w w b b|                               w (0, 6)  b (6, 2)
    rank 1                   |b v v v v v . .|               b (0, 1)  v (1, 5)

Stage 3 cuts each parameter into equal parts of ceil(n / ranks) elements, the last one padded; a rank holds
its parts of all parameters of a group, concatenated. Files record the order of parameters, not the slices.

Merged tensors are `StoredTensor`: the slices are read when the tensor is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeGuard

import torch

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import MASTER, StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
MIXED = (
    "Files of several checkpoints or ranks are mixed up, or one is damaged. Copy all files of one "
    "checkpoint again"
)


@dataclass(frozen=True)
class VectorSlice:
    """Elements [start, start + numel) of a flat vector."""

    vector: StoredTensor
    start: int
    numel: int

    def read(self) -> torch.Tensor:
        """Return the elements, flat."""
        stop = self.start + self.numel
        flat = self.vector.read().reshape(-1)
        return flat[self.start : stop]


@dataclass(frozen=True)
class Shard:
    """One group of parameters on one rank. kind → flat vectors that together hold it, in order."""

    place: object
    vectors: Mapping[str, Sequence[StoredTensor]]

    @property
    def size(self) -> int:
        """Number of elements, with padding: the largest of any kind, since masters may lack it."""
        sizes = []
        for vectors in self.vectors.values():
            sizes.append(sum(vector.shape[0] for vector in vectors))
        return max(sizes)

    def cut(self, kind: str, start: int, numel: int) -> Iterator[VectorSlice]:
        """Yield the elements [start, start + numel) of the joined vectors. Raises CheckpointError beyond the end."""
        vectors = self.vectors[kind]
        stop = start + numel
        # The interval must be inside of what the vectors hold together.
        total = sum(vector.shape[0] for vector in vectors)
        if start < 0 or numel < 0 or stop > total:
            raise CheckpointError(
                f"{self.place}: a parameter has elements {start} to {stop} of "
                f"{kind}, which has {total}. {MIXED}."
            )
        # The interval may continue over several of the vectors.
        end = 0
        for vector in vectors:
            first = end
            end += vector.shape[0]
            low = max(start, first)
            high = min(stop, end)
            if low < high:
                yield VectorSlice(vector, low - first, high - low)


def joined(
    name: str, shape: tuple[int, ...], slices: Sequence[VectorSlice], place: object
) -> StoredTensor:
    """Return the tensor whose flattened elements the slices hold. Raises CheckpointError if their number differs."""
    # The slices must be as many elements as the tensor, of one dtype.
    held = sum(one.numel for one in slices)
    wanted = math.prod(shape)
    dtypes = {one.vector.dtype for one in slices}
    if held != wanted or len(dtypes) > 1:
        raise CheckpointError(
            f"{place}: shards hold {held} elements of {name}, in {len(dtypes)} dtype(s), "
            f"and its shape is {list(shape)}. {MIXED}."
        )

    def read() -> torch.Tensor:
        # A single slice needs no copy.
        if len(slices) == 1:
            return slices[0].read().view(shape)
        whole = torch.cat([one.read() for one in slices])
        return whole.view(shape)

    dtype = dtypes.pop() if dtypes else torch.float32
    where = slices[0].vector.place if slices else str(place)
    return StoredTensor(shape, dtype, read, f"{name} in {where}")


# ---- Stages 1 and 2, and BF16_Optimizer.


def merged_slices(
    shapes: Shapes, shards: Sequence[Shard], mappings: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, StoredTensor]]:
    """Return the mapping kind → name → tensor, of one group. mappings: `param_slice_mappings` of each rank.

    Raises CheckpointError unless the slices of all ranks, in order, are the parameters in order.
    """
    kinds = _kinds_of(shards)
    # The slices of all ranks must cover the parameters in order, without holes or overlaps.
    slices: dict[str, list[tuple[Shard, int, int]]] = {name: [] for name in shapes}
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    waiting = iter(numbers.items())
    current = None
    left = 0
    for shard, mapping in zip(shards, mappings):
        at = 0
        for name, fragment in mapping.items():
            # A slice continues the current parameter or begins the next one.
            fields = fields_of(fragment)
            start = fields.get("start")
            numel = fields.get("numel")
            if not _is_count(start) or not _is_count(numel):
                raise CheckpointError(
                    f"{shard.place}: the slice of {name} is {fragment!r}. It is damaged."
                )
            if left == 0:
                current, left = next(waiting, (None, 0))
            if name != current or start < at or numel > left:
                raise CheckpointError(
                    f"{shard.place}: elements {start} to {start + numel} of it are of "
                    f"{name}, where {left} elements of {current} should follow. {MIXED}."
                )
            slices[name].append((shard, start, numel))
            at = start + numel
            left = left - numel
        # A parameter continues on the next rank only if it fills this one to its end.
        if left and at != shard.size:
            raise CheckpointError(
                f"{shard.place}: it holds {shard.size} elements, and {current}, which "
                f"continues on the next rank, ends at {at}. {MIXED}."
            )
    # No elements may remain after the last rank.
    absent = [current] if left else []
    absent += [name for name, numel in waiting if numel]
    if absent:
        raise CheckpointError(
            f"{shards[0].place} and the other {len(shards) - 1} shards lack elements of "
            f"{len(absent)} parameters, first {absent[0]}. {MIXED}."
        )
    # The same slices hold the elements of each kind.
    found: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in kinds}
    for kind in kinds:
        for name, shape in shapes.items():
            parts: list[VectorSlice] = []
            for shard, start, numel in slices[name]:
                parts += shard.cut(kind, start, numel)
            found[kind][name] = joined(name, shape, parts, shards[0].place)
    return found


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether a value of a file is a number of elements."""
    return type(value) is int and value >= 0


def replayed_slices(
    shapes: Shapes, shards: Sequence[Shard]
) -> list[dict[str, dict[str, int]]]:
    """Return `param_slice_mappings` of files that lack them (before DeepSpeed 0.7), from sizes and order."""
    # The parameters follow each other through the equal shards.
    size = shards[0].size
    mappings: list[dict[str, dict[str, int]]] = [{} for _ in shards]
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape)
        first_rank = at // size if size else 0
        for rank in range(first_rank, len(shards)):
            # The part of the parameter in the interval of this rank.
            begin = rank * size
            low = max(at, begin)
            high = min(end, begin + size)
            if low < high:
                mappings[rank][name] = {"start": low - begin, "numel": high - low}
        at = end
    return mappings


# ---- Stage 3.


def merged_parts(
    shapes: Shapes, shards: Sequence[Shard]
) -> dict[str, dict[str, StoredTensor]]:
    """Return kind → name → tensor, of all groups together. Raises CheckpointError where sizes do not fit."""
    ranks = len(shards)
    kinds = _kinds_of(shards)
    # Every rank must hold an equal part of each parameter.
    parts = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
    expected = sum(parts.values())
    for shard in shards:
        for kind, vectors in shard.vectors.items():
            held = sum(vector.shape[0] for vector in vectors)
            if held != expected:
                raise CheckpointError(
                    f"{shard.place}: it holds {held} elements of {kind}, and a rank of "
                    f"{ranks} holds {expected} of these parameters. {MIXED}."
                )
    # Each parameter begins where the part of the one before it ends.
    starts = dict(zip(parts, accumulate(parts.values(), initial=0)))
    found: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in kinds}
    for kind in kinds:
        for name, shape in shapes.items():
            found[kind][name] = _part(
                name, shape, kind, shards, starts[name], parts[name]
            )
    return found


def _kinds_of(shards: Sequence[Shard]) -> list[str]:
    """Return the kinds of vectors, which all ranks must hold."""
    first = shards[0]
    for shard in shards:
        if shard.vectors.keys() != first.vectors.keys():
            kinds = ", ".join(shard.vectors)
            others = ", ".join(first.vectors)
            raise CheckpointError(
                f"{shard.place} holds {kinds}, and {first.place} {others}. {MIXED}."
            )
    return list(first.vectors)


def _part(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    shards: Sequence[Shard],
    start: int,
    size: int,
) -> StoredTensor:
    """Return one parameter from its parts. start, size: of the part in the vectors of each rank."""
    numel = math.prod(shape)
    slices: list[VectorSlice] = []
    for rank, shard in enumerate(shards):
        # The last parts are padded, and may hold no element.
        left = max(0, numel - rank * size)
        slices += shard.cut(kind, start, min(size, left))
    return joined(name, shape, slices, shards[0].place)


def merged_fragments(
    shapes: Shapes, fragments: Sequence[Mapping[str, StoredTensor]], place: object
) -> dict[str, StoredTensor]:
    """Return frozen parameters, of which stage 3 stores a part in the model file of each rank.

    fragments: name → part, of each rank

    Raises CheckpointError when a rank has no part of one.
    """
    found = {}
    for name, shape in shapes.items():
        held = []
        for one in fragments:
            part = one.get(name)
            if not isinstance(part, StoredTensor):
                raise CheckpointError(
                    f"{place}: a rank has no part of the frozen parameter {name}. {MIXED}."
                )
            held.append(part)
        # The parts follow each other; the last one is padded.
        left = math.prod(shape)
        slices = []
        for part in held:
            numel = min(left, math.prod(part.shape))
            if numel:
                slices.append(VectorSlice(part, 0, numel))
            left -= numel
        found[name] = joined(name, shape, slices, place)
    return found


def vectors_of(state: Any, master: Any, place: object) -> dict[str, list[StoredTensor]]:
    """Return the mapping kind → [vector] of a group: the master, and the tensors of its optimizer state as long as it.

    state: {"step", "exp_avg", …} of torch's optimizer; empty before its first step
    """
    if not isinstance(master, StoredTensor) or len(master.shape) != 1:
        raise CheckpointError(
            f"{place}: the fp32 weights of a group are {type(master).__name__}, not a flat "
            "tensor. They may have been offloaded to a disk: save with DeepSpeed after "
            "loading there without offloading."
        )
    # Values that are no flat vectors, such as the step, are no state of elements.
    kinds = {MASTER: [master]}
    for kind, value in (state or {}).items():
        is_flat = isinstance(value, StoredTensor) and len(value.shape) == 1
        if is_flat and value.shape[0] >= master.shape[0]:
            kinds[kind] = [value]
    return kinds
