"""A GPU that does not exist: tensors that claim to be on "cuda", computed on the CPU, and every use recorded.

    with fake_cuda(), FakeGpu() as gpu:
        x = torch.zeros(4, device="cuda")               # x.is_cuda, x.device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
    gpu.order.problems                                  # races between streams, see stream_order.py
    gpu.order.waits                                     # where the host waited for the device

The package runs its code for GPUs: `is_cuda`, streams, events, page-locked memory, asynchronous copies. Each
operation runs at once on the CPU and is recorded with the current stream and the bytes it reads and writes.
An operation that mixes tensors of the host with those of the device raises torch's error.
To torch's C++ the tensors are on the "lazy" device, whose backward needs no driver; Python sees "cuda".
Backwards run in a thread of their own.

Not imitated: limits of memory, time, kernels of csrc/gpu (give --kernels torch), CUDA graphs.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _modes,
)
from torch.utils._python_dispatch import (
    _pop_mode,
    _push_mode,
    return_and_correct_aliasing,
)

from megatron_ds.extensions.kernels.cpu import compiled_adam
from megatron_ds.host.dispatch_mode import DispatchMode
from megatron_ds.host.side_streams import side_stream

from . import cuda_attention
from .nested import leaves, mapped
from .stream_order import HOST, Memory, StreamOrder, place

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
DEFAULT = "default stream"
PATIENCE = 3  # times that a host asks an event before it is taken to wait for it
_of_thread, _made = threading.local(), []
# Operations whose results have a size, or a value in Python, that depends on values on the device.
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.bincount,
    aten.is_nonzero,
}
MAKES = {
    aten.empty,
    aten.empty_strided,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
}
COPIES = {aten.copy_, aten._to_copy}
INDEXED = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index,
    aten._unsafe_index_put,
}
# Besides elementwise operations, those that take one number from the host.
TAKE_A_NUMBER = {aten.fill_, aten.masked_fill, aten.masked_fill_, aten.index_fill_}


def gpu() -> "FakeGpu":
    """The GPU of this thread; of a thread that has none, as one that reads data, the last that was made."""
    return getattr(_of_thread, "gpu", None) or _made[-1]


# ------------------------------------------------------------------------------------------ tensors
class DeviceTensor(torch.Tensor):
    """A tensor on the fake GPU. inner: its values, on the CPU. memory: its allocation."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="lazy:0",
        )
        self.inner, self.memory = inner, memory
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return gpu().run(func, args, kwargs or {})

    @property
    def device(self):
        return CUDA

    @property
    def is_cuda(self):
        return True

    @property
    def data(self):
        return DeviceTensor(self.inner.data, self.memory)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inner, self.memory = value.inner, value.memory

    def to(self, *args, copy=False, **kwargs):
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(
            *args, **kwargs
        )
        device = None if device is not None and device.type == "cuda" else device
        if (
            not copy
            and device is None
            and dtype in (None, self.dtype)
            and memory_format is None
        ):
            return self
        named = {
            "dtype": dtype or self.dtype,
            "non_blocking": non_blocking,
            "copy": copy,
        }
        return (
            _tensor_to(self, **named)
            if device is None
            else _tensor_to(self, device, **named)
        )

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return FakeStorage(self)

    def record_stream(self, stream):
        self.memory.streams.add(stream.name)

    def is_pinned(self, device=None):
        return False

    def __repr__(self, **_):
        return f"DeviceTensor({self.inner})"


class FakeStorage:
    """The part of a storage's interface that the package uses."""

    def __init__(self, tensor: DeviceTensor):
        self._storage, self._memory = tensor.inner.untyped_storage(), tensor.memory
        self._cdata = self._storage._cdata

    def nbytes(self):
        return self._storage.nbytes()

    def data_ptr(self):
        return self._storage.data_ptr()

    def resize_(self, nbytes: int):
        order, grows = gpu().order, nbytes > self._storage.nbytes()
        if not grows:
            order.free(self._memory)
        self._storage.resize_(nbytes)
        if grows:
            self._memory.owner = gpu().current
            self._memory.streams.clear()
            order.run(
                gpu().current,
                "allocation",
                [],
                [(self._memory, 0, nbytes)],
                is_launch=False,
            )


# ------------------------------------------------------------------------------------------ streams
class FakeStream:
    """torch.cuda.Stream."""

    _count = 0

    def __init__(self, device=None, priority=0, name: str = ""):
        FakeStream._count += 1
        self.priority = priority
        self.name, self.device, self.cuda_stream = (
            name or f"stream {FakeStream._count}",
            CUDA,
            id(self),
        )

    def wait_event(self, event: "FakeEvent"):
        event.wait(self)

    def wait_stream(self, stream: "FakeStream"):
        self.wait_event(stream.record_event())

    def record_event(self, event: "FakeEvent | None" = None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self):
        gpu().order.host_wait(gpu().order.event(self.name), "stream.synchronize")

    def query(self):
        return False

    def __eq__(self, other):
        return isinstance(other, FakeStream) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class FakeEvent:
    """torch.cuda.Event. An event that was never recorded is reached at once, as CUDA defines."""

    def __init__(
        self, enable_timing=False, blocking=False, interprocess=False, external=False
    ):
        self.clock: dict[str, int] = {}
        self.queries, self.is_beyond_reach = 0, False

    def record(self, stream: FakeStream | None = None):
        self.clock = gpu().order.event((stream or current_stream()).name)
        self.queries, self.is_beyond_reach = 0, gpu().is_stuck

    def wait(self, stream: FakeStream | None = None):
        gpu().order.wait((stream or current_stream()).name, self.clock)

    def synchronize(self):
        gpu().order.host_wait(self.clock, "event.synchronize")

    def query(self):
        """The device comes to the event when the host has asked often enough to be waiting for it, and never to
        one that was recorded behind work which is stuck."""
        # A thread that looks at the device is not the host that waits for it.
        if getattr(_of_thread, "gpu", None) is None:
            return not self.is_beyond_reach
        self.queries += 1
        is_reached = all(
            gpu().order.clocks[HOST].get(actor, 0) >= time
            for actor, time in self.clock.items()
        )
        if self.is_beyond_reach or is_reached:
            return not self.is_beyond_reach
        if self.queries <= PATIENCE and not gpu().is_stuck:
            return False
        self.synchronize()
        return True

    def elapsed_time(self, end: "FakeEvent"):
        return 1.0


def current_stream(device=None) -> FakeStream:
    return FakeStream(name=gpu().current)


@contextmanager
def stream_context(stream: FakeStream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    of, before = gpu(), gpu().current
    of.current = before if stream is None else stream.name
    try:
        yield
    finally:
        of.current = before


def synchronize(device=None) -> None:
    if not _made:  # memory of a GPU is freed after it
        return
    order = gpu().order
    for stream in list(order.clocks):
        order.host_wait(order.event(stream), "torch.cuda.synchronize")


# ------------------------------------------------------------------------------------------ the device
class PageLocked(NamedTuple):
    """A block of page-locked memory. taken: its bytes, of which `nbytes` were asked for."""

    place: str
    nbytes: int
    taken: int


class FakeRuntime:
    """torch.cuda.cudart(). Memory may be unlocked by another thread than the one that has locked it."""

    cudaError = SimpleNamespace(success="cudaSuccess")

    def __init__(self):
        self.cudaHostRegister = gpu().register
        self.cudaHostUnregister = gpu().unregister


class FakeGpu(DispatchMode):
    """The GPU of this thread within the context. order: what happened on it. current: name of the stream.
    is_stuck: whether the work that is launched from now on never ends."""

    def __init__(self):
        super().__init__()
        self.order, self.current, self.is_paused = StreamOrder(), DEFAULT, False
        self.is_stuck = False
        self._memories: dict[int, weakref.ref[Memory]] = {}
        self._pinned: dict[int, Memory] = {}
        self._keeps: list[torch.Tensor] = []
        self._registered: dict[int, Memory] = {}  # by address
        self.page_locked: list[PageLocked] = []

    def __enter__(self):
        self._before = getattr(_of_thread, "gpu", None)
        _of_thread.gpu = self
        _made.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _of_thread.gpu = self._before
        _made.remove(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func, args, kwargs):
        """An operation, on the host or on the device."""
        device, pins = kwargs.get("device"), kwargs.pop("pin_memory", False)
        flat = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [x for x in flat if isinstance(x, DeviceTensor)]
        to_device = device is not None and torch.device(device).type in ("cuda", "lazy")
        if not on_device and not to_device:
            if not self.is_paused:
                self._use(func, HOST, args, kwargs)
            out = func(*args, **kwargs)
            return self.pin(out) if pins else out
        if func.overloadpacket is aten._foreach_copy_ and on_host(args):
            for target, source in zip(*args[:2]):  # as CUDA does between devices
                self.run(aten.copy_.default, (target, source, *args[2:]), kwargs)
            return None
        self._refuse_mixed(func, args, kwargs)
        inner_args, inner_kwargs = mapped(inner_of, (args, kwargs))
        packet = func.overloadpacket
        out = cuda_attention.IN_PLACE_OF.get(packet, func)(*inner_args, **inner_kwargs)
        if packet in COPIES:
            return self._copied(func, args, kwargs, out)
        if (
            packet in WAITS
            or _index_is_mask(packet, args)
            or (packet is aten.repeat_interleave and kwargs.get("output_size") is None)
        ):
            self._use(func, self.current, args, kwargs)
            self.order.host_wait(self.order.event(self.current), str(packet))
        elif not func.is_view:
            self._use(func, self.current, args, kwargs)
        made = mapped(
            lambda x: self.wrap(x, packet) if isinstance(x, torch.Tensor) else x, out
        )
        return return_and_correct_aliasing(func, args, kwargs, made)

    def _refuse_mixed(self, func, args, kwargs) -> None:
        """CUDA kernels read numbers and indices on the host, no other tensor there."""
        packet = func.overloadpacket
        if packet in COPIES:
            return
        takes_numbers = torch.Tag.pointwise in func.tags or packet in TAKE_A_NUMBER
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            is_written = (
                argument.alias_info is not None and argument.alias_info.is_write
            )
            for tensor in on_host(value):
                if packet in INDEXED and i == 1 and isinstance(args[0], DeviceTensor):
                    self.order.host_wait(
                        self.order.event(self.current), "a copy of indices"
                    )
                elif is_written or tensor.dim() or not takes_numbers:
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                        f"cpu: {argument.name} of {packet} at {place()}"
                    )

    def wrap(self, inner: torch.Tensor, packet=None) -> DeviceTensor:
        """A tensor of the device with these values; a new allocation unless it is a view of one."""
        key = inner.untyped_storage()._cdata
        memory = self._memories[key]() if key in self._memories else None
        if memory is None:
            memory = Memory(self.order, self.current)
            self._memories[key] = weakref.ref(memory)
            self.order.run(
                self.current,
                "allocation" if packet in MAKES else str(packet),
                [],
                [(memory, 0, inner.untyped_storage().nbytes())],
                is_launch=False,
            )
        return DeviceTensor(inner, memory)

    def register(self, address: int, nbytes: int, flags: int) -> str:
        """cudaHostRegister: the pages themselves are locked."""
        self._registered[address] = Memory(self.order, HOST)
        self.page_locked.append(PageLocked(place(), nbytes, nbytes))
        return FakeRuntime.cudaError.success

    def unregister(self, address: int) -> str:
        """cudaHostUnregister"""
        del self._registered[address]
        return FakeRuntime.cudaError.success

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the memory of a CPU tensor page-locked. torch's allocator takes blocks of powers of two."""
        nbytes = tensor.untyped_storage().nbytes()
        taken = 1 << (nbytes - 1).bit_length() if nbytes else 0
        self.page_locked.append(PageLocked(place(), nbytes, taken))
        self._pinned[tensor.untyped_storage()._cdata] = Memory(self.order, HOST)
        self._keeps.append(tensor)  # so that no other storage gets the address
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._locked_memory(tensor) is not None

    def _locked_memory(self, tensor: torch.Tensor) -> Memory | None:
        storage = tensor.untyped_storage()
        return self._pinned.get(storage._cdata) or self._registered.get(
            storage.data_ptr()
        )

    def range_of(self, t: torch.Tensor):
        """[(memory, start, stop)] of a tensor; [] for ordinary memory of the host, and without elements."""
        if isinstance(t, DeviceTensor):
            memory, t = t.memory, t.inner
        else:
            memory = self._locked_memory(t)
        if memory is None or not t.numel():
            return []
        span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        return [
            (
                memory,
                t.storage_offset() * t.itemsize,
                (t.storage_offset() + span) * t.itemsize,
            )
        ]

    def _use(self, func, actor, args, kwargs) -> None:
        nothing_is_locked = not self._pinned and not self._registered
        if actor == HOST and (nothing_is_locked or func.is_view):
            return
        reads, writes = [], []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            into = (
                writes
                if argument.alias_info is not None and argument.alias_info.is_write
                else reads
            )
            for t in leaves(value):
                if isinstance(t, torch.Tensor) and func.overloadpacket not in MAKES:
                    into += self.range_of(t)
        if reads or writes:
            self.order.run(actor, str(func.overloadpacket), reads, writes)

    def _copied(self, func, args, kwargs, out):
        """copy_ and _to_copy: with the host if one side is there."""
        if func.overloadpacket is aten.copy_:
            target, source = args[0], args[1]
            asynchronous = kwargs.get(
                "non_blocking", args[2] if len(args) > 2 else False
            )
        else:
            source, asynchronous = args[0], kwargs.get("non_blocking", False)
            device = kwargs.get("device")
            stays = (
                isinstance(source, DeviceTensor)
                if device is None
                else torch.device(device).type != "cpu"
            )
            target = self.wrap(out, func.overloadpacket) if stays else out
            if kwargs.get("pin_memory"):
                self.pin(out)
        self.order.run(
            self.current, "copy", self.range_of(source), self.range_of(target)
        )
        host = next(
            (t for t in (source, target) if not isinstance(t, DeviceTensor)), None
        )
        if (
            host is not None
            and not (asynchronous and self.is_pinned(host))
            and not (
                host is source and host.dim() == 0 and func.overloadpacket is aten.copy_
            )
        ):
            why = (
                "a copy from or to memory that is not page-locked"
                if asynchronous
                else "a blocking copy"
            )
            self.order.host_wait(self.order.event(self.current), why)
        return target


def inner_of(x):
    if isinstance(x, DeviceTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) else x


def on_host(value) -> list[torch.Tensor]:
    return [
        t
        for t in leaves(value)
        if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor)
    ]


def _index_is_mask(packet, args) -> bool:
    if packet not in INDEXED:
        return False
    return any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
        for i in args[1]
    )


def _pin_memory(tensor, device=None):
    with torch.utils._python_dispatch._disable_current_modes():
        copy = tensor.clone(memory_format=torch.contiguous_format)
    return gpu().pin(copy)


_torch_tensor, _tensor_to = torch.tensor, torch.Tensor.to


def _to(self, *args, **kwargs):
    """Tensor.to of a tensor of the host; torch's asks the driver for the current device of plain "cuda"."""
    if (
        args
        and not isinstance(args[0], torch.Tensor | torch.dtype)
        and torch.device(args[0]).type == "cuda"
    ):
        args = (CUDA, *args[1:])
    return _tensor_to(self, *args, **kwargs)


def _tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """torch.tensor copies numbers to a GPU, and the host waits for it."""
    made = _torch_tensor(data, dtype=dtype)
    if pin_memory:
        made = made.pin_memory()
    made = made if device is None else made.to(device)
    return made.requires_grad_() if requires_grad else made


_run_backward = torch.autograd._engine_run_backward


def _on_autograds_thread(*args, **kwargs):
    """A backward as torch runs those of a device: in a thread of its own, whose current stream is the default
    one, while the caller waits."""
    of = getattr(_of_thread, "gpu", None)
    if of is None or getattr(_of_thread, "is_autograds", False):
        return _run_backward(*args, **kwargs)
    modes, results, errors = _modes(), [], []

    def run():
        _of_thread.gpu, _of_thread.is_autograds = of, True
        with ExitStack() as stack:
            for mode in modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            try:
                results.append(_run_backward(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  raised by the caller
                errors.append(error)

    thread = threading.Thread(target=run, name="autograd")
    with stream_context(FakeStream(name=DEFAULT)):
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


_adamw_ = compiled_adam.adamw_


def _recorded_adamw_(rows, **options):
    """The compiled update of the host, which takes addresses, as an access of the host."""
    of = gpu()
    of.order.run(
        HOST,
        "adamw_",
        [r for row in rows for r in of.range_of(row.grad)],
        [
            r
            for row in rows
            for t in (row.p, row.m, row.v, row.low)
            if t is not None
            for r in of.range_of(t)
        ],
    )
    _adamw_(rows, **options)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """torch.cuda is a stand-in, for all threads; each thread then needs a `FakeGpu`."""
    cuda = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        Stream=FakeStream,
        Event=FakeEvent,
        stream=stream_context,
        current_stream=current_stream,
        default_stream=lambda device=None: FakeStream(name=DEFAULT),
        synchronize=synchronize,
        cudart=FakeRuntime,
        mem_get_info=lambda device=None: (1 << 36, 1 << 37),
        memory_reserved=lambda device=None: 3 << 20,
        memory_allocated=lambda device=None: 1 << 20,
        max_memory_allocated=lambda device=None: 1 << 30,
        empty_cache=lambda: None,
        max_memory_reserved=lambda device=None: 1 << 30,
        _lazy_init=lambda: None,
        get_device_name=lambda device=None: "NVIDIA H200",
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *_: True,
        reset_peak_memory_stats=lambda device=None: None,
    )
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.callback(side_stream.cache_clear)
        stack.enter_context(patch.object(compiled_adam, "adamw_", _recorded_adamw_))
        stack.enter_context(patch.object(torch, "tensor", _tensor))
        stack.enter_context(
            patch.object(torch.autograd, "_engine_run_backward", _on_autograds_thread)
        )
        stack.enter_context(patch.object(torch.Tensor, "to", _to))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pin_memory))
        stack.enter_context(
            patch.object(
                torch.Tensor,
                "is_pinned",
                lambda tensor, device=None: gpu().is_pinned(tensor),
            )
        )
        yield
