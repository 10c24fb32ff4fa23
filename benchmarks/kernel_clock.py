"""`Clock`: the time of calls on a device, and the bytes that a copy and an operation move in it.

Bytes are the least that the operation moves, as its first contestant computes it: memory that it is given,
read once; results, arguments that it changes and what it keeps for backward, written once; in the backward,
gradients of the results and kept tensors read once, gradients of the arguments written once. Two tensors in
the same memory count once: a sum and its summands have one gradient.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

WARM_UP = 5
CACHE_BYTES = 1 << 28
SECONDS = 1.5  # of the repetitions of slow calls, such as dropout in torch's operations
# Cycles that the device sleeps before the first call, about half a millisecond: the host launches all calls of a
# repetition meanwhile, so that no call waits for its launch.
HOST_LEAD = 1_000_000


class Clock:
    """Microseconds of calls on a device.

    repeats  how many calls are counted, after `warm_up` that are not
    seconds  after which slow calls are no longer repeated
    """

    def __init__(self, device: torch.device, repeats: int, seconds: float = SECONDS):
        self.device = device
        self.repeats = repeats
        self.seconds = seconds
        self.warm_up = min(WARM_UP, repeats)
        nbytes = CACHE_BYTES if device.type == "cuda" else 1
        self._cache = torch.empty(nbytes, dtype=torch.int8, device=device)

    def microseconds(self, *calls: Callable[[], object]) -> list[float]:
        """The median time of each of the calls, which run one after the other, with overwritten caches.

        Calls that take long are repeated less often: at least once, after one call that warms up.
        """
        taken: list[list[float]] = [[] for _ in calls]
        start = time.monotonic()
        for i in range(self.warm_up + self.repeats):
            # Slow calls end early, after one that is counted.
            is_late = i > 0 and time.monotonic() - start > self.seconds
            if is_late and taken[0]:
                break
            passed = self._once(calls)
            if i >= self.warm_up or is_late:
                for of_call, us in zip(taken, passed):
                    of_call.append(us)
        return [statistics.median(of_call) for of_call in taken]

    def _once(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Microseconds of each call. The cache is overwritten first."""
        self._cache.zero_()
        if self.device.type == "cuda":
            torch.cuda._sleep(HOST_LEAD)
        # A stamp before the first call and after each.
        stamps = [self._now()]
        for call in calls:
            call()
            stamps.append(self._now())
        turns = list(pairwise(stamps))
        if self.device.type != "cuda":
            return [(end - start) * 1e6 for start, end in turns]
        # Events are read when the device has reached them.
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in turns]

    def _now(self) -> Any:
        """A time stamp: an event of the stream on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def copy_bandwidth(clock: Clock, nbytes: int) -> float:
    """Bytes a second that a copy reads and writes. nbytes: of the copied tensor."""
    # Numbers of fp32.
    source = torch.zeros(nbytes // 4, device=clock.device)
    target = torch.empty_like(source)
    [us] = clock.microseconds(lambda: target.copy_(source))
    return 2 * nbytes / us * 1e6


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results."""
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def traffic(
    function: Callable, arguments: tuple, written: Sequence[int]
) -> tuple[int, int]:
    """(bytes of one forward, bytes of its backward).

    written: numbers of the tensors among the arguments that it changes
    """
    given = tensors_of(arguments)
    kept = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        results = tensors_of(function(*arguments))
    # What is written: results, changed arguments, and what is kept for backward.
    unchanged = {t.data_ptr() for i, t in enumerate(given) if i not in written}
    changed = [given[i] for i in written]
    made = []
    for t in (*results, *changed, *kept):
        if t.data_ptr() not in unchanged:
            made.append(t)
    forward = distinct_bytes(given) + distinct_bytes(made)
    # The backward, where there is one.
    trained = [t for t in given if t.requires_grad]
    differentiable = [t for t in results if t.requires_grad]
    if not trained or not differentiable:
        return forward, 0
    gradients = [torch.ones_like(t) for t in differentiable]
    found = torch.autograd.grad(differentiable, trained, gradients, allow_unused=True)
    read = distinct_bytes([*gradients, *kept])
    made = distinct_bytes(t for t in found if t is not None)
    return forward, read + made


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors; memory that begins at one address counts once."""
    # The largest of the tensors at each address.
    found: dict[int, int] = {}
    for t in tensors:
        address = t.data_ptr()
        found[address] = max(found.get(address, 0), t.nbytes)
    return sum(found.values())
