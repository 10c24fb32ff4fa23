"""Which rank computes each matrix of an optimizer that needs whole ones, and in which round. Pure.

Owners are chosen so that the costliest rank has the least to compute: matrices in falling order of o · i ·
min(o, i), each to the rank with the least so far (Graham 1969, the LPT rule). Among equal ranks neighbours
follow one another diagonally over both axes, which spreads the messages. Rounds limit the memory: the
matrices of a rank in a round have about ROUND elements.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..errors import ConfigError
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import Matrices, ParamSpec
from ..optim import MakeOptimizer, ParamGroup, group_of
from .data_groups import Axes, DataGroups, shard_of
from .set_plan import SetPlan

ROUND = 32 * 1024**2  # 128 MiB in fp32, and about three times that at work
Span = tuple[int, int]


@dataclass(frozen=True)
class MatrixEntry:
    """A parameter with matrices, as the ranks that divide its layer and the data-parallel ones hold it.

    spec   of the logical tensor; along "ep" the part of this rank
    axes   over which its gradient is summed
    spans  elements [start, stop) of the flattened slice on each data-parallel rank; empty: all on each
    """

    spec: ParamSpec
    axes: Axes
    spans: Sequence[Span]

    @property
    def cost(self) -> int:
        """Multiplications of an update, as `Matrices.cost` counts them."""
        return self.matrices.cost(self.spec.shape)

    @property
    def matrices(self) -> Matrices:
        """What the parameter consists of."""
        assert self.spec.matrices is not None, "`matrix_entries` checks it"
        return self.spec.matrices


def matrix_entries(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    groups: Sequence[ParamGroup],
    optimizer: MakeOptimizer,
) -> list[MatrixEntry]:
    """Return the parameters that an optimizer updates. parameters: to which the indices in the plans refer.

    Raises ConfigError for one that is not the weight of a hidden linear layer.
    """
    entries = []
    for plan in plans:
        for slot, index in enumerate(plan.members):
            p = parameters[index]
            group = group_of(spec_of(p), groups)
            if not plan.frozen and group.optimizer == optimizer:
                spec = _of_these_experts(p, group)
                entries.append(MatrixEntry(spec, plan.reduced_over, _spans(plan, slot)))
    return entries


def _spans(plan: SetPlan, slot: int) -> tuple[Span, ...]:
    """Return what each data-parallel rank has of a slot; empty where each has all."""
    shards = plan.layout.shards
    if plan.policy.optimizer is None or shards == 1:
        return ()
    of_shards = plan.layout.spans(slot)
    return tuple(
        of_shards[shard_of(rank, shards, plan.inner)] for rank in range(shards)
    )


def _of_these_experts(p: nn.Parameter, group: ParamGroup) -> ParamSpec:
    """Return the spec without its split along "ep": of the experts that this rank has."""
    spec = spec_of(p)
    if spec.matrices is None:
        raise ConfigError(
            f"parameter group {group.name!r} has {spec.name} of shape {list(spec.shape)}, which is not the "
            "weight of a hidden linear layer, but its optimizer makes matrices orthogonal. Give it an "
            "optimizer that treats elements one by one, such as adam."
        )
    if (split := spec.split_over("ep")) is not None:
        shape = tuple(
            p.shape[dim] if dim == split.dim else n for dim, n in enumerate(spec.shape)
        )
        spec = replace(
            spec, shape=shape, splits=tuple(s for s in spec.splits if s.axis != "ep")
        )
    return spec


Owned = tuple[MatrixEntry, int | None, int | None]
"""An entry, its data-parallel owner, its tensor-parallel owner; None: each rank computes it."""


def plan_rounds(
    entries: Sequence[MatrixEntry], groups: DataGroups, elements: int = ROUND
) -> Iterator[list[Owned]]:
    """Yield the entries of each round with their owners. Equal on all ranks that have these entries.

    elements: of the matrices of one rank in a round, about
    """
    loads = Loads(groups)
    at_hand: list[MatrixEntry] = []
    for entry in entries:
        ranks = groups.by_axes[entry.axes].size * groups.dividing(entry.axes).size
        if at_hand and sum(e.spec.numel for e in (*at_hand, entry)) > elements * ranks:
            yield loads.assign(at_hand)
            at_hand = []
        at_hand.append(entry)
    if at_hand:
        yield loads.assign(at_hand)


class Loads:
    """What each rank computes so far, by the axes of its data-parallel group."""

    def __init__(self, groups: DataGroups):
        self._sizes = {
            axes: (group.size, groups.dividing(axes).size)
            for axes, group in groups.by_axes.items()
        }
        self._heaps: dict[tuple[Axes, bool, bool], list[tuple[int, int, int, int]]] = {}

    def assign(self, entries: Sequence[MatrixEntry]) -> list[Owned]:
        """(entry, data-parallel owner, tensor-parallel owner), in the given order; None: each rank is.

        Equal on all ranks, because it depends on the entries alone.
        """
        owners = {}
        for entry in sorted(entries, key=lambda e: -e.cost):
            data, tp = self._sizes[entry.axes]
            over_data = bool(entry.spans)
            over_tp = entry.spec.tensor_split is not None and tp > 1
            key = entry.axes, over_data, over_tp
            if key not in self._heaps:
                ds = data if over_data else 1
                ts = tp if over_tp else 1
                self._heaps[key] = [
                    (0, i, i % ds, (i % ds + i // ds) % ts) for i in range(ds * ts)
                ]
            load, order, d, t = heapq.heappop(self._heaps[key])
            heapq.heappush(self._heaps[key], (load + entry.cost, order, d, t))
            owners[entry.spec.name] = d if over_data else None, t if over_tp else None
        return [(entry, *owners[entry.spec.name]) for entry in entries]
