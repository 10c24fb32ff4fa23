"""`CompressedSet`: what a set of parameters has in addition where ranks exchange signs, its bytes, and its
pieces of checkpoints.

P data-parallel ranks ("workers") differ in some of their state: in the error of what they send, and between
two exchanges of 0/1 Adam in the momentum and the sum of their updates. A checkpoint has logical tensors, of
the shape of the parameter:

    worker_error/NAME       mean of the workers' errors; each rank writes a shard of it
    worker_error.3/NAME     error of worker 3, written by this worker
    server_error/NAME       errors of the servers; each has a shard
    exp_avg/NAME, exp_avg.3/NAME, local_sum/NAME, local_sum.3/NAME    likewise, while they differ

As many workers as saved it each read their own tensors, whatever the rest of the layout is, and continue
with the same values. Of another number P' each worker reads the mean. Exchanges add (1 / P) Σ_i e_i to their
results in the course of time (compressed_mean.py), and P' copies of the mean have the same mean: what has not
been sent yet is sent once. Errors of zero would lose it; the errors of P workers on P' > P would shrink it.

Vectors are exchanged in full precision: their errors are always zero, and no worker saves them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...host.large_pages import huge_page_zeros
from ...mpu.collectives import reduce_scatter_into_
from ...mpu.group import Group
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import ParamSpec
from ...zero.data_groups import DataGroups
from ...zero.layout import SlotPiece
from ...zero.norm import is_counted, norm_views
from ...zero.parameter_set import ParameterSet
from ...zero.set_plan import SetPlan
from ...zero.shard_optimizer import Leaf, ShardOptimizer
from ...zero.state_piece import StatePiece
from .compressed_mean import CompressedMean
from .compressed_optimizer import CompressedOptimizer
from .phases import Phases
from .units import is_vector

MOMENTUM = "exp_avg"
SUM = "local_sum"
WORKER_ERROR = "worker_error"
SERVER_ERROR = "server_error"


@dataclass(frozen=True)
class CompressedSet:
    """What a set has in addition.

    momentum    "exp_avg" of the whole buffer
    sums        "local_sum" of it, where ranks make steps of their own; else None
    norm_views  the whole gradient of this rank, as far as it counts in the norm
    """

    of: ParameterSet
    mean: CompressedMean
    momentum: torch.Tensor
    sums: torch.Tensor | None
    norm_views: list[torch.Tensor]

    @property
    def gradient(self) -> torch.Tensor:
        """The whole gradient of this rank, padding included."""
        grads = self.of.buckets
        assert grads is not None, "sets that are trained have gradients"
        return grads.flat

    @property
    def group(self) -> Group:
        """The workers."""
        return self.mean.group

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Kind of state → the whole buffer of what can differ between workers."""
        sums = {} if self.sums is None else {SUM: self.sums}
        return {WORKER_ERROR: self.mean.worker_error, MOMENTUM: self.momentum} | sums

    @property
    def nbytes(self) -> int:
        """Bytes that are not counted with the leaves: errors, and what the buffers have besides the leaves."""
        in_leaves = sum(leaf.piece.padded_numel for leaf in self.of.resident)
        buffers = [flat for kind, flat in self.buffers.items() if kind != WORKER_ERROR]
        return self.mean.nbytes + sum(
            flat.nbytes - in_leaves * flat.itemsize for flat in buffers
        )

    def saved(self, own: Collection[str]) -> Iterator[StatePiece]:
        """Pieces to write, of kinds that the leaves do not have. own: the kinds of `buffers` that differ now.
        Collective if there are any."""
        for kind, flat in self.buffers.items():
            if kind in own:
                yield from self._shards(kind, self._mean_of(flat))
        if WORKER_ERROR not in own:
            yield from self._wholes(WORKER_ERROR)
        yield from self._shards(SERVER_ERROR, self.mean.server_error)
        yield from self.of_worker(own)

    def loaded(self, own: Collection[str]) -> Iterator[StatePiece]:
        """Pieces to fill, of kinds that the leaves do not have. own: the kinds of which a checkpoint has each
        worker's."""
        if WORKER_ERROR not in own:
            yield from self._wholes(WORKER_ERROR)
        yield from self._shards(SERVER_ERROR, self.mean.server_error)
        yield from self.of_worker(own)

    def of_worker(self, own: Collection[str]) -> Iterator[StatePiece]:
        """Yield the pieces of these kinds that this worker alone has."""
        for kind, flat in self.buffers.items():
            for piece in self.of.plan.layout.whole_slots() if kind in own else ():
                if kind != WORKER_ERROR or not is_vector(self._spec(piece)):
                    yield self._piece(
                        f"{kind}.{self.group.rank}", piece, flat[piece.flat :]
                    )

    def _wholes(self, kind: str) -> Iterator[StatePiece]:
        """Pieces of a buffer that is equal on all ranks, or becomes so."""
        for piece in self.of.plan.layout.whole_slots():
            yield self._piece(
                kind,
                piece,
                self.buffers[kind][piece.flat :],
                self.group.rank,
                self.group.size,
            )

    def _shards(self, kind: str, shard: torch.Tensor) -> Iterator[StatePiece]:
        for piece in self.of.plan.layout.slot_intersections(self.group.rank):
            yield self._piece(kind, piece, shard[piece.offset :])

    def _piece(
        self,
        kind: str,
        piece: SlotPiece,
        tail: torch.Tensor,
        replica: int = 0,
        replicas: int = 1,
    ) -> StatePiece:
        flat = tail[: piece.stop - piece.start]
        return StatePiece(
            self._spec(piece), kind, piece.start, piece.stop, flat, replica, replicas
        )

    def _spec(self, piece: SlotPiece) -> ParamSpec:
        return spec_of(self.of.parameters[piece.slot])

    def _mean_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the mean of a whole buffer over all workers. Collective."""
        layout = self.of.plan.layout
        mean = flat.new_empty(layout.shard_numel)
        for bucket, own in zip(layout.buckets, layout.shard_pieces(self.group.rank)):
            to = mean[own.offset : own.offset + own.stop - own.start]
            reduce_scatter_into_(to, flat[bucket.start : bucket.stop], self.group)
        return mean.div_(self.group.size)


def make_set(
    s: ParameterSet,
    phases: Phases,
    groups: DataGroups,
    resident: ShardOptimizer,
    device: torch.device,
) -> CompressedSet:
    """Return a set with errors of zero. The "exp_avg" of its leaves become views of the whole buffer."""
    layout = s.plan.layout
    grads = s.buckets
    assert grads is not None, "sets that are trained have gradients"
    counted = [
        p
        for p in layout.whole_slots()
        if is_counted(spec_of(s.parameters[p.slot]), groups)
    ]
    buffers = {MOMENTUM: huge_page_zeros(layout.numel, device=device)}
    if phases.sums_locally:
        buffers[SUM] = huge_page_zeros(layout.numel, device=device)
    for name, flat in buffers.items():
        for leaf in s.resident:
            place = slice(leaf.piece.flat, leaf.piece.flat + leaf.piece.padded_numel)
            resident.place_state(leaf, name, flat[place])
    return CompressedSet(
        s,
        CompressedMean(s.plan, s.parameters, groups, device),
        buffers[MOMENTUM],
        buffers.get(SUM),
        norm_views(grads.flat, counted, grads.start_of),
    )


def numbers_of(
    leaf: Leaf, optimizer: CompressedOptimizer, plan: SetPlan, rank: int, size: int
) -> Iterator[StatePiece]:
    """Numbers of a logical parameter. Ranks with parts of one have the same: the first part is written."""
    of = leaf.spec
    spec = ParamSpec(of.name, (1,), of.init, tied=of.tied, tied_copy=of.tied_copy)
    if plan.policy.optimizer is not None:
        rank = int(leaf.piece.start > 0)
        size = 1
    for name, tensor in optimizer.numbers_of(leaf.tensor):
        yield StatePiece(spec, name, 0, 1, tensor, rank, size)


def counts_of_workers(own: Collection[str], workers: int) -> dict[str, int]:
    """Numbers of a checkpoint that has these kinds of each of so many workers."""
    return {
        f"workers_of_{kind}": workers * (kind in own)
        for kind in (WORKER_ERROR, MOMENTUM, SUM)
    }


def own_kinds(numbers: Mapping[str, float], workers: int) -> set[str]:
    """Return the kinds of which a checkpoint with these numbers has each worker's, if it has so many workers."""
    return {
        kind
        for kind in (WORKER_ERROR, MOMENTUM, SUM)
        if workers > 1 and numbers.get(f"workers_of_{kind}") == workers
    }
