"""`CompressedMean`: the mean of a tensor over data-parallel ranks, sent as one bit an element, with the
errors of the compression of one call added to the next (Tang et al. 2021, arXiv:2102.02888, section 4.2).

For x_i on rank i of P, and each unit (`UnitMap`):

    worker i    y_i = x_i + e_i        e_i ← y_i - decoded(signs of y_i, s_i)         signs → all-to-all
    server r    z = Σ_i decoded_i / P + e'   e' ← z - decoded(signs of z, s')         signs → all-gather
    all         result = decoded(signs of z, s')

Rank r is the server of shard r of the buffer. All scales are those of the logical parameter: sums of squares
are added over tensor-parallel parts, and s' over all servers. So the result depends on the number of workers,
and not on tensor or pipeline parallelism, buckets or padding. The sums of a call

    Σ_t result_t = Σ_t mean_i x_i,t - mean_i e_i - e'        after calls t = 1 … T

lose nothing: an element that a sign misrepresents is corrected in later calls. On one rank the mean is x, and
in the first call what ranks of an earlier run have not sent.

Sent in a call, for n elements with padding, u units and w rows (payload as in mpu/group.py):

    over the data group      all-to-all n / 8, all-gather n / 8 and 4 P u, all-reduce w and 8 u; and an
                             all-reduce of 4 bytes for each element of vectors, of which the mean is exact
    over the tensor-parallel ranks and the holders of tied parameters     see `ParameterNorms.sent`
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ...host.large_pages import huge_page_zeros
from ...mpu.collectives import all_gather, all_gather_into_, all_reduce_, all_to_all_
from ...mpu.group import Group
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import DATA_AXES
from ...zero.data_groups import DataGroups
from ...zero.exchange import Sent
from ...zero.layout import Layout
from ...zero.parameter_norms import NormEntry, ParameterNorms
from ...zero.set_plan import SetPlan, is_tied
from .signs import PER_BYTE, decoded, pack_signs, scale_of
from .units import count_rows, from_shards, is_vector, map_units, to_shards

FP32_BYTES = 4
SCALE_LISTS = 2
SERVER_LISTS = 1


class CompressedMean:
    """The means of one set of parameters.

    parameters    in the order of the plan's layout
    worker_error  e, fp32 [numel]
    server_error  e', fp32 [shard_numel], of this rank's shard
    """

    def __init__(
        self,
        plan: SetPlan,
        parameters: Sequence[nn.Parameter],
        groups: DataGroups,
        device: torch.device,
    ):
        layout = plan.layout
        self.group = groups.ranks_of(plan.reduced_over).data
        self.worker_error = huge_page_zeros(layout.numel, device=device)
        self.server_error = huge_page_zeros(layout.shard_numel, device=device)
        self._parameters = parameters
        self._slots = [slice(s.start, s.padded_stop) for s in layout.slots]
        self._units = units = map_units(layout, parameters, device)
        self._of_workers, self._of_servers = _norms(parameters, groups, device)
        self._shard_units = to_shards(units.block_unit, layout)[self.group.rank].clone()
        mine = {
            piece.slot: slice(piece.offset, piece.offset + piece.padded_numel)
            for piece in layout.slot_intersections(self.group.rank)
        }
        vectors = [
            s.start for s, p in zip(layout.slots, parameters) if is_vector(spec_of(p))
        ]
        self._vectors = [
            slice(s.start, s.stop) for s in layout.slots if s.start in vectors
        ]
        self._shard_slots = [mine.get(i, slice(0, 0)) for i in range(len(parameters))]

    @property
    def nbytes(self) -> int:
        """Bytes of the errors."""
        return self.worker_error.nbytes + self.server_error.nbytes

    def forget(self) -> None:
        """Begin with errors of zero."""
        self.worker_error.zero_()
        self.server_error.zero_()

    def reduce_(self, x: torch.Tensor) -> None:
        """x, fp32 [numel], becomes the compressed mean of all ranks' x. Collective; the host does not wait.

        Padding of x is zero, and stays so.
        """
        if self.group.size == 1:
            x.add_(self.worker_error).add_(self.server_error)
            self.forget()
            return
        units = self._units
        layout = self._units.layout
        ranks = self.group.size
        vectors = self._take_vectors(x)
        y = self.worker_error.add_(x)
        rows = units.live_rows(y)
        all_reduce_(rows, self.group, "max")
        live = units.live_elements(rows)

        # This rank as a worker compresses its own values.
        scales, roots = self._scales(y, rows)
        packed = pack_signs(y)
        y.sub_(decoded(packed, scales[units.block_unit], live))
        received = torch.empty_like(packed)
        all_to_all_(received, to_shards(packed, layout).view(-1), self.group)
        of_ranks = all_gather(scales, self.group).view(ranks, -1)

        # This rank as the server of a shard compresses the mean.
        live_here = to_shards(live, layout)[self.group.rank]
        total = torch.zeros_like(self.server_error)
        for signs, of_rank in zip(received.view(ranks, -1), of_ranks):
            total.add_(decoded(signs, of_rank[self._shard_units], None))
        z = self.server_error.add_(total.div_(ranks).mul_(live_here))
        norms = self._of_servers(
            [[z[part] for part in self._shard_slots]], self._parameters
        )
        scales = scale_of(norms[0], roots)
        packed = pack_signs(z)
        z.sub_(decoded(packed, scales[self._shard_units], live_here))
        whole = packed.new_empty(ranks * packed.numel())
        all_gather_into_(whole, packed, self.group)
        x.copy_(decoded(from_shards(whole, layout), scales[units.block_unit], live))
        if vectors:
            torch._foreach_copy_([x[part] for part in self._vectors], vectors)

    def _take_vectors(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the means of vectors; in x they become zero."""
        views = [x[part] for part in self._vectors]
        if not views:
            return []
        joined = torch.cat(views)
        torch._foreach_zero_(views)
        all_reduce_(joined, self.group)
        return list(joined.div_(self.group.size).split([len(view) for view in views]))

    def _scales(
        self, y: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales of this worker, roots of the numbers of live elements), fp32 [units]."""
        counts = self._units.live_counts(rows).sqrt_().split(1)
        norms, roots = self._of_workers(
            [[y[part] for part in self._slots], counts], self._parameters
        )
        return scale_of(norms, roots), roots


def messages(
    layout: Layout,
    parameters: Sequence[nn.Parameter],
    group: Group,
    groups: DataGroups,
) -> Iterator[Sent]:
    """Yield the messages of `reduce_`: (operation, group, bytes, calls); of a plan, too, whose groups do not send.

    parameters: in the order of the layout. group: the workers.
    """
    numel = layout.numel
    if group.size == 1:
        return
    sizes = [p.numel() for p in parameters if is_vector(spec_of(p))]
    vectors = sum(sizes)
    if vectors:
        yield "all_reduce", group, FP32_BYTES * vectors, 1
    yield "all_reduce", group, count_rows(layout, parameters), 1
    yield "all_to_all", group, numel // PER_BYTE, 1
    yield "all_gather", group, FP32_BYTES * group.size * len(parameters), 1
    yield "all_gather", group, numel // PER_BYTE, 1
    for norms, lists in zip(
        _norms(parameters, groups, torch.device("cpu")), (SCALE_LISTS, SERVER_LISTS)
    ):
        yield from (
            ("all_reduce", over, nbytes, 1) for over, nbytes in norms.sent(lists)
        )


def _norms(
    parameters: Iterable[nn.Parameter], groups: DataGroups, device: torch.device
) -> tuple[ParameterNorms, ParameterNorms]:
    """(norms of what each rank has whole, norms of what lies in shards)."""
    entries = lambda is_split: [
        NormEntry(spec_of(p), DATA_AXES, is_split, is_tied(p, groups))
        for p in parameters
    ]
    return (
        ParameterNorms(entries(False), groups, device),
        ParameterNorms(entries(True), groups, device),
    )
