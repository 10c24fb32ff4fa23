"""`DataGroups`: the process groups of ZeRO; `Hierarchy`: inner and outer groups of data-parallel ranks.

With n data-parallel ranks and h in an inner group (a node): rank = o h + i, where i is the position in the
inner group and o the position in the outer group. Then

    shard of a rank = i n/h + o             weights         part i of h of every bucket
                                            gradients, masters, moments         its shard, one of n

    bucket      |------------------- whole -------------------|     n = 6, h = 3
    parts       |     i = 0     |     i = 1     |     i = 2   |
    shards      |  r0   |  r3   |  r1   |  r4   |  r2  |  r5  |

The part of an inner rank is contiguous and consists of the shards of its outer group, in order: gradients are
reduce-scattered over the inner group, then that part over the outer group; updated shards are gathered over
the outer group, then parts over the inner group. One h-th of a bucket travels between nodes, and gathers of
layers stay inside a node. The outer group of a flat hierarchy has one rank: the second collective does
nothing, and the shard of rank r is shard r.

(Wang et al. 2023, arXiv:2306.10209, section 3.2, keep weights over n and a second copy over h for backward
only. Here the part over h is the only copy: forward stays inside a node as well, and memory is the same.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import LayoutError
from ..mpu.collectives import share_memory
from ..mpu.group import Group, solo
from ..mpu.param_spec import DATA_AXES, EXPERT_DATA_AXES, ParamSpec

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Hierarchy:
    """The data-parallel groups of one rank.

    data     all n ranks
    gathers  the ranks of `inner`, to gather the weights of layers; None: `inner` itself
    """

    data: Group
    inner: Group
    outer: Group
    gathers: Group | None = None

    @classmethod
    def flat(cls, data: Group, gathers: Group | None = None) -> "Hierarchy":
        """Return a hierarchy with one level: all ranks are in one inner group."""
        outer = solo(f"{data.axes}-outer", data.ranks[data.rank])
        return cls(data, data, outer, gathers)

    @property
    def gathering(self) -> Group:
        """The ranks of `inner`, connected for gathers of weights."""
        return self.gathers or self.inner

    @property
    def shard(self) -> int:
        """The shard that this rank owns."""
        return shard_of(self.data.rank, self.data.size, self.inner.size)


def shard_of(rank: int, size: int, inner: int) -> int:
    """Return the shard that data-parallel rank `rank` of `size` owns, with `inner` ranks in an inner group."""
    o, i = divmod(rank, inner)
    return i * (size // inner) + o


@dataclass(frozen=True)
class DataGroups:
    """The groups over which ZeRO communicates.

    by_axes  mesh axes over which gradients are summed → the group of the ranks along these axes; DATA_AXES is
             always present
    tp       tensor-parallel ranks
    etp      ranks that divide each expert; None: those of tp
    model    ranks that together hold one copy of the model: tp-pp
    tied     ranks that hold parameters tied across pipeline stages: embd; one rank if nothing is tied
    inner, outer  the DATA_AXES ranks as a hierarchy, for the policy that needs one
    gathers  mesh axes → the ranks that gather weights, connected once more: gathers then do not wait for
             reductions. Axes may be absent
    """

    by_axes: Mapping[Axes, Group]
    tp: Group = field(default_factory=solo)
    model: Group = field(default_factory=solo)
    tied: Group = field(default_factory=solo)
    inner: Group | None = None
    outer: Group | None = None
    gathers: Mapping[Axes, Group] = field(default_factory=dict)
    etp: Group | None = None

    @property
    def data(self) -> Group:
        """All data-parallel ranks."""
        return self.by_axes[DATA_AXES]

    def dividing(self, axes: Axes) -> Group:
        """Return the ranks that divide the layers whose gradients are summed over these axes."""
        if axes == EXPERT_DATA_AXES and self.etp is not None:
            return self.etp
        return self.tp

    @property
    def rank_by_axes(self) -> dict[Axes, int]:
        """The position of this rank in each of the groups."""
        return {axes: group.rank for axes, group in self.by_axes.items()}

    def ranks_of(self, axes: Axes) -> Hierarchy:
        """Return the ranks over which gradients of these axes are summed and state is split."""
        gathers = self.gathers.get(axes)
        if axes == DATA_AXES and self.inner is not None and self.outer is not None:
            return Hierarchy(self.data, self.inner, self.outer, gathers)
        return Hierarchy.flat(self.by_axes[axes], gathers)

    def gathering_apart(self, connect: Callable[[Group], Group]) -> "DataGroups":
        """These groups, with communicators of their own for gathers of weights.

        connect: the ranks of a group, connected once more. Collective over the world.
        """
        gathers = {axes: connect(self.ranks_of(axes).inner) for axes in self.by_axes}
        return replace(self, gathers=gathers)

    def check(self, spec: ParamSpec) -> None:
        """Raises LayoutError if there is no group over which the parameter's gradient could be summed."""
        if spec.reduced_over not in self.by_axes:
            given = ", ".join("-".join(axes) for axes in self.by_axes)
            raise LayoutError(
                f"the gradient of {spec.name} is summed over the ranks along {'-'.join(spec.reduced_over)}, "
                f"but only groups for {given} were given: a sum over other ranks would mix different "
                "parameters. Give the group in `by_axes`."
            )

    def sharing_memory(self) -> "DataGroups":
        """These groups, in which the ranks of a host map each other's memory, to gather weights and to
        sum gradients.

        Collective over the data group.
        """
        if self.inner is not None:
            return replace(self, inner=share_memory(self.inner))
        return replace(
            self, by_axes={**self.by_axes, DATA_AXES: share_memory(self.data)}
        )
