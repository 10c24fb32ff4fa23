"""`StageWork`: what a stage computes and sends for one micro-batch, recorded as its own code runs without memory.

    Call   a call: its name, the implementation, its work
    Begun      a message of a group within the layers begins
    Awaited    the code waits for that message
    Allocated  a large block of memory of a processor, which some runs return when they free it

in the order in which the code makes them, for each phase of the schedule: forward, whole backward, and where it is
split its input half and its weight half. Operations of torch are seen as they are called, with those of autograd;
what a kernel computes is stated beside its operation (`ops.work`). No model, layer or operation is named here: a new
one is recorded as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from ...host.allocator import OWN_PAGES_BYTES
from ...host.dispatch_mode import DispatchMode
from ...host.fake_cpu import DEVICE_OF
from ...mpu.group import Group, Traffic
from ...mpu.group import Work as UnderWay
from ...ops.kernel_table import work_watched
from ...ops.work import CallWork, Product, bytes_of, product_work, tensors_in
from ...pipeline.instruction import Op

aten = torch.ops.aten


class Call(NamedTuple):
    """A call. count: calls that it stands for"""

    name: str
    implementation: str
    work: CallWork


class Begun(NamedTuple):
    """A message. nbytes: payload, as `mpu.group.Traffic` counts it. number: names it within its phase"""

    operation: str
    axes: str
    size: int
    nbytes: int
    number: int


class Awaited(NamedTuple):
    """A wait for a message."""

    number: int


class Allocated(NamedTuple):
    """A new block of memory of a processor, so large that the allocator may give it pages of its own."""

    nbytes: int


Event = Call | Begun | Awaited | Allocated


@dataclass(frozen=True)
class StageWork:
    """Phase (F and B, or F, I and W) → events of one micro-batch, in order."""

    phases: dict[Op, tuple[Event, ...]] = field(default_factory=dict)

    def of(self, phase: Op) -> tuple[Event, ...]:
        """Return the events of a phase; none where the stage has no such phase."""
        return self.phases.get(phase, ())

    @cached_property
    def flops(self) -> dict[Op, float]:
        """Phase → FLOPs of products and of attention."""
        return {
            phase: sum(e.work.flops for e in events if isinstance(e, Call))
            for phase, events in self.phases.items()
        }


class WorkRecorder(DispatchMode):
    """Records the work of a stage; its context is that in which the stage runs. traffic: of the groups of the layers"""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self._traffic = traffic
        self._events: list[Event] = []
        self._later: list[Call] = []
        self._phases: dict[Op, tuple[Event, ...]] = {}
        self._collects_later = False
        self._factor = 1.0
        self._recomputes = False
        self._messages = 0

    @contextmanager
    def phase(self, op: Op) -> Iterator[None]:
        """Record what runs within the context as one phase."""
        self._events = []
        # Backwards that autograd computes from what the forward kept belong to the first phase behind it.
        self._collects_later = op is Op.F
        if op is not Op.F:
            self._events += reversed(self._later)
            self._later = []
        log = self._traffic.log
        self._traffic.log = self
        try:
            with self, work_watched(self):
                yield
        finally:
            self._traffic.log = log
        self._phases[op] = tuple(self._events)

    def stage_work(self) -> StageWork:
        """Return what was recorded."""
        return StageWork(dict(self._phases))

    # ---- calls that no operation of torch shows
    def called(self, name: str, implementation: str, work: CallWork) -> None:
        """Record a call."""
        self._events.append(Call(name, implementation, work.times(self._factor)))

    def will_differentiate(
        self, name: str, implementation: str, work: CallWork
    ) -> None:
        """Record the backward of a call in the phase that computes it."""
        if self._recomputes:
            return
        backward = Call(f"{name} backward", implementation, work.times(self._factor))
        (self._later if self._collects_later else self._events).append(backward)

    def repeats(self, factor: float) -> None:
        """Count each call from now on as `factor` calls."""
        self._factor = factor

    def recomputation_contexts(self) -> tuple[Any, Any]:
        """Return the contexts of a forward and of its recomputation.

        Autograd differentiates the graph of the forward. The recomputation only computes what that graph needs, so
        its calls have no backward, although autograd records them.
        """
        return nullcontext(), self._recomputing()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        self._recomputes = True
        try:
            yield
        finally:
            self._recomputes = False

    # ---- messages
    def start(
        self,
        operation: str,
        group: Group,
        num_bytes: int,
        begin: Callable[[], UnderWay],
    ) -> UnderWay:
        """Record a message, and when it is waited for."""
        number = self._messages
        self._messages += 1
        self._events.append(Begun(operation, group.axes, group.size, num_bytes, number))
        return _Watched(begin(), self._events, number)

    # ---- operations of torch
    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is not DEVICE_OF and not _is_free(function):
            work = _work_of(function, args, kwargs, result)
            self.called(function.overloadpacket.__name__, "torch", work)
        if function is not DEVICE_OF and _makes_tensors(function):
            self._events += map(Allocated, _large_blocks(result))
        return result


class _Watched:
    """A message whose waits are recorded."""

    def __init__(self, work: UnderWay, events: list[Event], number: int):
        self._work = work
        self._events = events
        self._number = number

    def wait(self) -> Any:
        self._events.append(Awaited(self._number))
        return self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


# Operations that move nothing: they allocate, or return the same memory in another form.
_FREE_NAMES = frozenset(
    "alias detach empty empty_like empty_strided new_empty new_empty_strided _unsafe_view resize_ set_ "
    "lift_fresh is_same_size is_pinned record_stream".split()
)
_free: dict[OpOverload, bool] = {}


def _is_free(function: OpOverload) -> bool:
    found = _free.get(function)
    if found is None:
        is_view = any(
            given.alias_info is not None and not given.alias_info.is_write
            for given in function._schema.arguments
        )
        found = is_view or function.overloadpacket.__name__ in _FREE_NAMES
        _free[function] = found
    return found


# Operations whose results share memory with an argument, without a mark in their schema.
_SHARING_NAMES = frozenset("_unsafe_view lift_fresh _reshape_alias".split())


@cache
def _makes_tensors(function: OpOverload) -> bool:
    """Return whether results are in new memory, rather than in that of an argument."""
    is_shared = any(made.alias_info is not None for made in function._schema.returns)
    return not is_shared and function.overloadpacket.__name__ not in _SHARING_NAMES


def _large_blocks(result: Any) -> Iterator[int]:
    """Yield the bytes of new blocks of a processor that have pages of their own."""
    for tensor in tensors_in((result,)):
        nbytes = bytes_of(tensor)
        if nbytes >= OWN_PAGES_BYTES and tensor.device.type == "cpu":
            yield nbytes


def _work_of(function: OpOverload, args: tuple, kwargs: dict, result: Any) -> CallWork:
    """Return the work of a call: products by their sizes, everything else by the bytes of its tensors."""
    known = _PRODUCTS.get(function.overloadpacket)
    if known is not None:
        return known(args, kwargs)
    given = list(tensors_in((*args, *kwargs.values())))
    made = list(tensors_in((result,)))
    tensors = given + made
    dtype = tensors[0].dtype if tensors else torch.float32
    return CallWork(nbytes=sum(map(bytes_of, tensors)), dtype=dtype)


def _matrices(at: int) -> Callable[[tuple, dict], CallWork]:
    """Return the work of a product whose factors are arguments number `at` and the next."""
    return lambda args, kwargs: product_work(*args[at : at + 2])


def _linear(args: tuple, kwargs: dict) -> CallWork:
    x, weight = args[:2]
    return product_work(x.flatten(0, -2), weight.t())


def _batches(at: int) -> Callable[[tuple, dict], CallWork]:
    def work(args: tuple, kwargs: dict) -> CallWork:
        a, b = args[at : at + 2]
        count, rows, inner = a.shape
        columns = b.shape[2]
        moved = bytes_of(a) + bytes_of(b) + count * rows * columns * a.element_size()
        return CallWork(
            (Product(count, rows, columns, inner),), nbytes=moved, dtype=a.dtype
        )

    return work


def _substitution(args: tuple, kwargs: dict) -> CallWork:
    """Return the work of a solution for a triangular matrix: that of the product with its inverse."""
    matrix, right = args[:2]
    *_, rows, columns = right.shape
    moved = bytes_of(matrix) + 2 * bytes_of(right)
    number = right.shape[:-2].numel()
    return CallWork(
        (Product(number, rows, columns, rows),), nbytes=moved, dtype=right.dtype
    )


def _attention(
    at: int, causal_at: int, times: float
) -> Callable[[tuple, dict], CallWork]:
    """Return the work of torch's attention whose q, k, v are arguments from `at` on. times: of a forward"""

    def work(args: tuple, kwargs: dict) -> CallWork:
        q, k, v = args[at : at + 3]
        is_causal = args[causal_at] if len(args) > causal_at else False
        b, n, rows, width = q.shape
        pairs = rows * k.shape[2] * (0.5 if is_causal else 1.0)
        flops = 2.0 * b * n * pairs * (width + v.shape[3])
        moved = 2 * bytes_of(q) + bytes_of(k) + bytes_of(v)
        return CallWork(scores=flops, nbytes=moved, dtype=q.dtype).times(times)

    return work


_PRODUCTS: dict[Any, Callable[[tuple, dict], CallWork]] = {
    aten.mm: _matrices(0),
    aten.addmm: _matrices(1),
    aten.addmm_: _matrices(1),
    aten.linear: _linear,
    aten.bmm: _batches(0),
    aten.baddbmm: _batches(1),
    aten.baddbmm_: _batches(1),
    aten.linalg_solve_triangular: _substitution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(0, 4, 1),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(1, 7, 2),
}
