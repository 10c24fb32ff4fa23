"""`GradCommunication`: how a bucket of gradients travels: in which dtype, and divided by what.

    accumulates (fp32)   |--------- bucket ---------|         |- shard -|    added, or the first of a step
                              ↓ / divisor, cast                    ↑ cast, × divisor
    travels (fp16)       |--------- bucket ---------|   sum   |- shard -|

In the dtype that gradients accumulate in they are summed where they lie. Another one has buffers of its own, two of them,
whatever the number of buckets.

Note: divisor. Gradients are sums (see buckets.py): there is nothing to average. A 16-bit sum of n ranks can leave the range of
fp16 though each of its terms, and the fp32 sum, are inside: dividing before and multiplying after avoids that. With a power of
two that costs no bit, but for elements below 2^-14 times the divisor, which lose some or vanish.
"""

from collections.abc import Callable

import torch

from ..mpu.collectives import all_reduce_, reduce_scatter_into_
from ..mpu.group import DONE, Group, Work
from .buffer_pool import BufferPool
from .data_groups import Hierarchy


class GradCommunication:
    """Shared by all sets of gradients of an optimizer.

    accumulates  dtype of the buffers that are summed
    travels      dtype in which they are; None: the same
    divisor      before the sum, multiplied with after it; None: the number of ranks
    """

    def __init__(self, accumulates: torch.dtype, device: torch.device, travels: torch.dtype | None = None,
                 divisor: float | None = 1.0):
        self.dtype = travels or accumulates
        self._divisor = divisor
        self._last: TwoHops | None = None
        self._wire = None if self.dtype == accumulates else BufferPool(self.dtype, device)

    @property
    def nbytes(self) -> int:
        return self._wire.nbytes if self._wire else 0

    def all_reduce(self, whole: torch.Tensor, ranks: Hierarchy) -> Work:
        """Sum over the ranks, in place. Collective."""
        if ranks.data.size == 1:
            return DONE
        buffer, sent = self._sent(whole, ranks.data)
        return self._landing(all_reduce_(sent, ranks.data, async_op=True), buffer, sent, whole, False, ranks.data)

    def reduce_scatter(self, whole: torch.Tensor, start: int, out: torch.Tensor, ranks: Hierarchy, *, add: bool) -> Work:
        """Sum over the ranks; this rank's part, from `start` of the whole on, is copied or added to `out`. Collective.

        whole is used up; `out` may be a part of it.
        """
        buffer, sent = self._sent(whole, ranks.data)
        shard = out if buffer is None and not add else sent[start:start + out.numel()]
        return self._landing(self._hops(sent, shard, ranks), buffer, shard, out, add, ranks.data)

    def finish(self) -> None:
        """Wait for all that travels in buffers of its own, and for the last to arrive."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        if self._wire:
            self._wire.retire_all()

    def _hops(self, sent: torch.Tensor, shard: torch.Tensor, ranks: Hierarchy) -> Work:
        """Sum over the inner group, then the part that arrives here over the outer one."""
        if ranks.outer.size == 1:
            return reduce_scatter_into_(shard, sent, ranks.inner, async_op=True)
        numel = sent.numel() // ranks.inner.size
        part = sent[ranks.inner.rank * numel:(ranks.inner.rank + 1) * numel]
        before, self._last = self._last, TwoHops(reduce_scatter_into_(part, sent, ranks.inner, async_op=True),
                                                 lambda: reduce_scatter_into_(shard, part, ranks.outer, async_op=True))
        if before is not None:
            before.go_on()
        return self._last

    def _divisor_of(self, group: Group) -> float:
        return 1.0 if group.size == 1 else self._divisor or float(group.size)

    def _sent(self, whole: torch.Tensor, group: Group) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(the buffer that was borrowed for it, the bucket as it travels)"""
        factor = 1 / self._divisor_of(group)
        if self._wire is None or group.size == 1:
            return None, whole if factor == 1 else whole.mul_(factor)
        buffer = self._wire.borrow(whole.numel(), 0)
        sent = buffer[:whole.numel()]
        return buffer, sent.copy_(whole) if factor == 1 else torch.mul(whole, factor, out=sent)     # divided, then rounded

    def _landing(self, work: Work, buffer: torch.Tensor | None, part: torch.Tensor, out: torch.Tensor, add: bool,
                 group: Group) -> Work:
        """part: where the sum arrives."""
        factor = self._divisor_of(group)
        if part is out and factor == 1:
            return work

        def then() -> None:
            if add:
                out.add_(part, alpha=factor)
            else:
                if part is not out:
                    out.copy_(part)
                if factor != 1:
                    out.mul_(factor)
            if buffer is not None:
                self._wire.give_back(buffer)

        landing = Landing(work, then)
        if buffer is not None:
            self._wire.reducing(landing, lambda: None)
        return landing


class TwoHops:
    """A collective after which another begins.

    Note: when. Here, not when somebody waits, which may be at another time on each rank: the second hop of a bucket begins
    right after the first hop of the next one, so all ranks issue all collectives in the same order.
    """

    __slots__ = ("_work", "_second")

    def __init__(self, first: Work, second: Callable[[], Work]):
        self._work, self._second = first, second

    def go_on(self) -> None:
        """The first is over, and the second begun, on return. Collective."""
        if self._second is not None:
            self._work.wait()
            self._work, self._second = self._second(), None

    def wait(self) -> None:
        self.go_on()
        self._work.wait()


class Landing:
    """A work with something to do when it is over: once, in the first `wait`."""

    __slots__ = ("_work", "_then")

    def __init__(self, work: Work, then: Callable[[], None]):
        self._work, self._then = work, then

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._then()
            self._work = self._then = None
