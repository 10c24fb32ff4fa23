"""`Hierarchy`: the data-parallel ranks of a set as inner groups of consecutive ranks (a node) and outer groups across them.

With n ranks, h in an inner group: rank = o h + i, where i is the place in the inner group, o that in the outer one, and

    shard of a rank = i n/h + o             weights         part i of h of every bucket
                                            gradients, masters, moments         its shard, one of n

    bucket      |------------------- whole -------------------|     n = 6, h = 3
    parts       |     i = 0     |     i = 1     |     i = 2   |
    shards      |  r0   |  r3   |  r1   |  r4   |  r2  |  r5  |

So the part of an inner rank is contiguous and made of the shards of its outer group, in order: gradients are reduce-scattered
over the inner group, then that part over the outer one; updated shards are gathered over the outer group, then parts over the
inner one. Between nodes travels one h-th of a bucket, and gathers of layers stay inside. The outer group of a flat hierarchy
has one rank: each second hop is nothing, and the shard of rank r is shard r.

(Wang et al. 2023, arXiv:2306.10209, section 3.2, keep weights over n and a second copy over h, for backward only; here the
part over h is the only copy: forward stays inside as well, and the memory is the same.)
"""

from dataclasses import dataclass

from ..mpu.group import Group, solo


@dataclass(frozen=True)
class Hierarchy:
    """The groups of one rank. data: all n."""

    data: Group
    inner: Group
    outer: Group

    @classmethod
    def flat(cls, data: Group) -> "Hierarchy":
        return cls(data, data, solo(f"{data.axes}-outer", data.ranks[data.rank]))

    @property
    def shard(self) -> int:
        return shard_of(self.data.rank, self.data.size, self.inner.size)


def shard_of(rank: int, size: int, inner: int) -> int:
    """The shard that data-parallel rank `rank` of `size` owns, with `inner` ranks in an inner group."""
    o, i = divmod(rank, inner)
    return i * (size // inner) + o
