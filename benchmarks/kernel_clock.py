"""`Clock`: the time of calls on a device, and the bytes that a copy and an operation move in it.

Bytes are the least that the operation moves, as its first contestant computes it: memory that it is given,
read once; results, arguments that it changes and what it keeps for backward, written once; in the backward,
gradients of the results and kept tensors read once, gradients of the arguments written once. Two tensors in
the same memory count once: a sum and its summands have one gradient.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

WARM_UP, CACHE_BYTES = 5, 1 << 28
SECONDS = 1.5  # of the repetitions of slow calls, such as dropout in torch's operations
# Cycles that the device sleeps before the first call, about half a millisecond: the host launches all calls of a
# repetition meanwhile, so that no call waits for its launch.
HOST_LEAD = 1_000_000


class Clock:
    """Microseconds of calls on a device."""

    def __init__(self, device: torch.device, repeats: int, seconds: float = SECONDS):
        self.device, self.repeats, self.seconds = device, repeats, seconds
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
            is_late = i > 0 and time.monotonic() - start > self.seconds
            if is_late and taken[0]:
                break
            passed = self._once(calls)
            if i >= self.warm_up or is_late:
                for of_call, us in zip(taken, passed):
                    of_call.append(us)
        return [statistics.median(of_call) for of_call in taken]

    def _once(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        self._cache.zero_()
        if self.device.type == "cuda":
            torch.cuda._sleep(HOST_LEAD)
        stamps = [self._now()]
        for call in calls:
            call()
            stamps.append(self._now())
        if self.device.type != "cuda":
            return [(end - start) * 1e6 for start, end in zip(stamps, stamps[1:])]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in zip(stamps, stamps[1:])]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def copy_bandwidth(clock: Clock, nbytes: int) -> float:
    """Bytes a second that a copy reads and writes."""
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
    """Bytes of one forward and its backward; written: numbers of the tensors that it changes."""
    given, kept = tensors_of(arguments), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        results = tensors_of(function(*arguments))
    unchanged = {t.data_ptr() for i, t in enumerate(given) if i not in written}
    made = [
        t
        for t in (*results, *(given[i] for i in written), *kept)
        if t.data_ptr() not in unchanged
    ]
    forward = distinct_bytes(given) + distinct_bytes(made)
    trained, differentiable = (
        [t for t in ts if t.requires_grad] for ts in (given, results)
    )
    if not trained or not differentiable:
        return forward, 0
    gradients = [torch.ones_like(t) for t in differentiable]
    found = torch.autograd.grad(differentiable, trained, gradients, allow_unused=True)
    return forward, distinct_bytes([*gradients, *kept]) + distinct_bytes(
        t for t in found if t is not None
    )


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors; memory that begins at one address counts once."""
    found: dict[int, int] = {}
    for t in tensors:
        found[t.data_ptr()] = max(found.get(t.data_ptr(), 0), t.nbytes)
    return sum(found.values())
