"""`QuantizedExchange`: gradients summed by all-to-alls of integers (Wang et al. 2023, arXiv:2306.10209,
section 3.3, qgZ).

    bucket       |---- for inner rank 0 ----|---- for inner rank 1 ----|
    first hop    encode, all-to-all over the inner group, decode, sum of its h pieces         8 bits
    part         |- outer 0 -|- outer 1 -|
    second hop   encode, all-to-all over the outer group, decode, sum of its n/h pieces       4 bits
    shard        |-----------|                                         added, or the first of a step

A reduce-scatter would have to add integers of different scales at each step of its ring, and round each time.
Here a gradient is rounded once for each hop, and added in fp32 in the order of the ranks. A part of an
inner rank is contiguous and holds the shards of its outer group in order (data_groups.py), so the pieces that
travel together need no rearrangement. Groups of one send and round nothing: with one inner group there is one
hop, of 4 bits. The paper has 4 bits for both; inside a node bytes are cheap, and with 8 the rounding of the
first hop is an eighteenth of that of the second.

Rounding errors are not carried over to the next step. A block with infinity or NaN becomes NaN, and the step
is skipped as without quantization.
"""

from collections.abc import Iterator

import torch

from ..host.transfers import Then
from ..mpu.group import Group, Waitable
from .data_groups import Hierarchy
from .exchange import UNDER_WAY, BucketGradient, OrderedExchange, Sent
from .number_blocks import Blocks, exchange_into

FP32_BYTES = 4


class QuantizedExchange(OrderedExchange):
    """A `GradientExchange` of sharded gradients.

    last   the format of the hop that ends at the shards
    first  of a hop over the inner group before it
    """

    def __init__(self, last: Blocks, first: Blocks, device: torch.device):
        super().__init__(device)
        self._last_format = last
        self._first_format = first

    @property
    def nbytes(self) -> int:
        return 0

    def planned_bytes(self, longest: int, ranks: int) -> int:
        """Return what is sent and received of buckets that are under way, and the decoded pieces of one, at most."""
        if ranks == 1:
            return 0
        encoded = max(
            self._first_format.nbytes(longest), self._last_format.nbytes(longest)
        )
        return 2 * (UNDER_WAY + 1) * encoded + longest * FP32_BYTES

    def sent(
        self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool
    ) -> Iterator[Sent]:
        for group, blocks, count in (
            (ranks.inner, self._inner_format(ranks), numel),
            (ranks.outer, self._last_format, numel // ranks.inner.size),
        ):
            for nbytes in blocks.parts(count):
                yield "all_to_all", group, nbytes, buckets

    def _inner_format(self, ranks: Hierarchy) -> Blocks:
        return self._last_format if ranks.outer.size == 1 else self._first_format

    def _start(self, bucket: BucketGradient) -> Waitable:
        ranks = bucket.ranks
        hops = [Hop(bucket.whole, ranks.inner, self._inner_format(ranks))]

        def second() -> Hop:
            hops[0] = Hop(hops[0].total(), ranks.outer, self._last_format)
            return hops[0]

        work: Waitable = hops[0]
        if ranks.outer.size > 1:
            work = self._two_hops(work, second)
        return Then(work, lambda: land(hops.pop().total(), bucket.out, bucket.add))


class Hop:
    """A `Waitable`: an all-to-all of pieces of `x` that has begun. x: flat, in whole blocks for each rank."""

    __slots__ = ("_blocks", "_group", "_own", "_sent", "_received", "_work")

    def __init__(self, x: torch.Tensor, group: Group, blocks: Blocks):
        self._blocks = blocks
        self._group = group
        self._own: torch.Tensor | None = x
        self._work: Waitable | None = None
        if group.size > 1:
            # kept until it has been sent
            self._own = None
            self._sent = blocks.encode(x)
            self._received = self._sent.like()
            self._work = exchange_into(self._received, self._sent, group)

    def wait(self) -> None:
        """The pieces of the other ranks are here."""
        if self._work is not None:
            self._work.wait()

    def total(self) -> torch.Tensor:
        """Return the sum of the received pieces: fp32, or `x` itself in a group of one. After `wait`."""
        if self._own is not None:
            return self._own
        encoded = self._received
        ranks = self._group.size
        numel = len(encoded.scales) * self._blocks.length
        pieces = torch.empty(numel, dtype=torch.float32, device=encoded.scales.device)
        return self._blocks.decode(encoded, pieces).view(ranks, -1).sum(0)


def land(total: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write or add a sum to the shard, which may be a view of where the sum is."""
    if add:
        out.add_(total)
    elif out.data_ptr() != total.data_ptr():
        out.copy_(total)
