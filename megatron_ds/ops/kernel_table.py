"""The table of kernels: which implementation computes an operation, by device, dtype and arguments.

    @Operation
    def rms_norm(x, weight, eps): ...                              # in torch's operations

    @rms_norm.kernel("cuda", devices=GPU, dtypes=FLOATS, fits=rows_of_packets)
    def rms_norm_on_gpus(x, weight, eps): ...

    rms_norm(x, weight, eps)             the first implementation that takes the arguments, else torch's

An operation is a function of torch's operations, which takes every device, dtype and shape, and any number of
faster implementations, the preferred ones first: kernels first, which the wing `extensions/kernels` registers
when an operation is first called, then other functions of torch's operations. `select("torch")` (--kernels
torch) leaves only torch's on GPUs and CPUs. Which implementations a device has is decided once; a call asks only
about its arguments.

A layer calls an operation again and again with arguments alike. It holds a `Bound`, which asks once for each
shape of the first tensor:

    self.norm = Bound(rms_norm)
    self.norm(x, weight, eps)            the implementation that its first call with this shape has chosen

Code inside torch.compile runs torch's operations: the compiler fuses those, and cannot look into kernels.

Meta tensors are planned as GPU tensors, and plans for CPUs run on FakeCpuTensors: an implementation must
therefore work without memory, by allocating its results.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..features import Provided
from .work import (
    WATCHERS,
    CallWork,
    Stated,
    Watcher,
    is_differentiated,
    moves,
    watched_by,
)

KERNELS: Provided[Any] = Provided("kernels")
GPU_KERNELS: Provided[Any] = Provided("gpu kernels")

logger = logging.getLogger(__name__)

CPU = ("cpu",)
GPU = ("cuda", "meta")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MODES = ("auto", "torch")
MOST_DRAWN_BY_CPU = (
    1 << 22
)  # random numbers of an example; a core draws fifty million in a second

BENCHMARK_SIZES = (
    (8192, 4096),
    (8192, 8192),
)  # (rows, width): tokens and hidden sizes of 7B and 70B
VOCABULARY_SIZES = ((8192, 50304), (8192, 131072))

OPERATIONS: dict[str, "Operation"] = {}

Calls = dict[tuple["Operation", torch.dtype, int], None]
"""(operation, dtype of the first tensor, its last size), in the order of the calls."""

Ran = dict[str, set[str]]
"""Name of an operation → names of the implementations that ran."""


def _always(*_: Any, **__: Any) -> bool:
    return True


def _all(*_: Any, **__: Any) -> str:
    return ""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    name       "cuda", or the processor's instructions
    devices    types of devices that it runs on; None for all
    dtypes     of the first tensor; None for all
    available  "" if it can run on this machine, else the reason why not; asked once
    suits      called with the operation's arguments: False where a later implementation is faster
    fits       called with the operation's arguments: "" if it takes them, else the reason, logged once
    is_opaque  plans see no operation of torch that does its work, so the operation states it

    `suits` and `fits` look at shapes, dtypes, devices and settings, never at the values of tensors.
    """

    name: str
    function: Callable[..., Any]
    devices: Sequence[str] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    available: Callable[[], str] = lambda: ""
    suits: Callable[..., bool] = _always
    fits: Callable[..., str] = _all
    is_opaque: bool = False


class Operation:
    """A function with several implementations; calling it runs the first that takes the arguments.

    in_torch: the implementation in torch's operations; the operation has its name and its docstring. The
    first argument is a tensor, whose device and dtype count.
    """

    def __init__(self, in_torch: Callable[..., Any]):
        functools.update_wrapper(self, in_torch)
        self.name = in_torch.__name__
        self.in_torch = in_torch
        self.implementations = [Implementation("torch", in_torch)]
        self._kernels = 0  # of the implementations
        self.examples: list[Callable[..., tuple]] = []
        self.benchmark_sizes: tuple[tuple[int, int], ...] = BENCHMARK_SIZES
        self.forward_work: Stated = moves
        self.backward_work: Stated = self._twice_the_forward
        OPERATIONS[self.name] = self

    def example(self, make: Callable[..., tuple]) -> Callable[..., tuple]:
        """Registers the decorated function make(rows, width, dtype, device) → arguments of the operation.

        Tensors whose gradients are defined require them. Checks of implementations use all examples
        (`kernel_check.py`), benchmarks the first, in the sizes (rows, width) of `benchmark_sizes`: an
        operation assigns its own where the default ones are not those of a model.
        """
        self.examples.append(make)
        return make

    @property
    def make_example(self) -> Callable[..., tuple] | None:
        """The first example."""
        return self.examples[0] if self.examples else None

    def implementation(
        self, name: str, **limits: Any
    ) -> Callable[[Callable], Callable]:
        """Adds the decorated function before torch's; limits: fields of `Implementation`."""

        def add(function: Callable) -> Callable:
            self.implementations.insert(-1, Implementation(name, function, **limits))
            CHOICES.change()
            return function

        return add

    def kernel(self, name: str, **limits: Any) -> Callable[[Callable], Callable]:
        """Adds the decorated function behind earlier kernels; limits: fields of `Implementation`."""

        def add(function: Callable) -> Callable:
            found = Implementation(name, function, **{"is_opaque": True, **limits})
            self.implementations.insert(self._kernels, found)
            self._kernels += 1
            CHOICES.change()
            return function

        return add

    def states_work(self, backward: Stated | None = None) -> Callable[[Stated], Stated]:
        """Makes the decorated function (arguments of the operation) → `work.CallWork` that of a call of a kernel.

        backward: the same for the backward of a call; None: it is that of the call, twice
        """

        def state(forward: Stated) -> Stated:
            self.forward_work = forward
            self.backward_work = backward or self._twice_the_forward
            return forward

        return state

    def _twice_the_forward(self, *arguments: Any, **named: Any) -> CallWork:
        return self.forward_work(*arguments, **named).times(2)

    def first_choice(self, device: str, dtype: torch.dtype) -> str:
        """Return the name of the implementation that a type of device tries first: "torch" if it has no other."""
        return _candidates(self, device, dtype, _MODE[0])[0].name

    def has(self, name: str, device: str, dtype: torch.dtype) -> bool:
        """Return whether a type of device has an implementation, with the kernels that are selected."""
        return any(
            entry.name == name for entry in _candidates(self, device, dtype, _MODE[0])
        )

    def remove(self, name: str, device: str, dtype: torch.dtype) -> None:
        """No longer run an implementation in this process, on a type of device, for a dtype."""
        entries = _candidates(
            self, device, dtype, "auto"
        )  # the list that all calls read
        entries[:] = [entry for entry in entries if entry.name != name]
        CHOICES.change()

    def __call__(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return self.choice(x, *arguments, **named)(x, *arguments, **named)

    def choice(
        self, x: torch.Tensor, *arguments: Any, **named: Any
    ) -> Callable[..., Any]:
        """Return the function that a call of these arguments runs."""
        if torch.compiler.is_dynamo_compiling():
            return self.in_torch
        for calls in _RECORDS if x.dim() > 1 else ():
            calls[self, x.dtype, x.shape[-1]] = None
        for entry in _candidates(self, x.device.type, x.dtype, _MODE[0]):
            if entry.suits is not _always and not entry.suits(x, *arguments, **named):
                continue
            reason = "" if entry.fits is _all else entry.fits(x, *arguments, **named)
            if not reason:
                choice_recorded(self.name, entry.name)
                if WATCHERS and entry.is_opaque:
                    self._pass_work(entry.name, (x, *arguments), named)
                return entry.function
            _log_once(self.name, entry.name, reason)
        raise AssertionError(f"{self.name} has no implementation in torch operations")

    def _pass_work(
        self, implementation: str, arguments: tuple, named: dict[str, Any]
    ) -> None:
        differentiates = is_differentiated(arguments, named)
        for watcher in WATCHERS:
            work = self.forward_work(*arguments, **named)
            watcher.called(self.name, implementation, work)
            if differentiates:
                again = self.backward_work(*arguments, **named)
                watcher.will_differentiate(self.name, implementation, again)


class Bound:
    """An operation at one place of a model, where arguments beside the first tensor do not change their shapes,
    dtypes and settings.

    It chooses an implementation at its first call, and again where the first tensor has another shape or dtype,
    or where the choices of the process change. Tensors must be contiguous, or always strided alike.
    """

    __slots__ = ("operation", "_chosen")

    def __init__(self, operation: Operation):
        self.operation = operation
        self._chosen: tuple[Any, Callable[..., Any]] = (None, operation)

    def __deepcopy__(self, memo: dict) -> "Bound":
        return Bound(self.operation)

    def __call__(self, x: torch.Tensor, *arguments: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.operation.in_torch(x, *arguments)
        key = x.shape, x.dtype, CHOICES.number
        known, function = self._chosen
        if key != known or key[2] is None:
            function = self.chosen(x, *arguments)
        return function(x, *arguments)

    def chosen(self, x: torch.Tensor, *arguments: Any) -> Callable[..., Any]:
        """Return the function that calls of arguments like these run."""
        function = self.operation.choice(x, *arguments)
        self._chosen = (x.shape, x.dtype, CHOICES.number), function
        return function


class Choices:
    """The choices of the process.

    number  changes when an operation may choose another implementation for the same arguments; None while calls
            are recorded: then every call must choose
    """

    def __init__(self):
        self.number: int | None = 0
        self._changes = 0

    def change(self) -> None:
        """What has been chosen is chosen anew."""
        self._changes += 1
        is_watched = _RECORDS or _RAN or WATCHERS
        self.number = None if is_watched else self._changes


CHOICES = Choices()


def random_tensors(
    dtype: torch.dtype, device: torch.device, *shapes: Sequence[int]
) -> list[torch.Tensor]:
    """Normally distributed leaves that require gradients; the values as those of `random_generator`."""
    draw = random_generator(device, sum(math.prod(shape) for shape in shapes))
    return [
        torch.randn(shape, generator=draw, device=draw.device)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]


def random_generator(device: torch.device, numbers: int) -> torch.Generator:
    """Seeded, for so many numbers of an example. Few have the same values on every device: a check on a GPU
    computes what tests have computed without one. Many, as in benchmarks, are drawn where they are used."""
    where = "cpu" if numbers <= MOST_DRAWN_BY_CPU else device
    return torch.Generator(where).manual_seed(0)


_RECORDS: list[Calls] = []
_RAN: list[Ran] = []


@contextmanager
def calls_recorded() -> Iterator[Calls]:
    """Collects the calls of operations within the context, also those of tensors without memory. Matrices and
    larger tensors only: flat ones have no width, on which a kernel could depend."""
    calls: Calls = {}
    _RECORDS.append(calls)
    CHOICES.change()
    try:
        yield calls
    finally:
        _RECORDS[:] = [other for other in _RECORDS if other is not calls]
        CHOICES.change()


def choice_recorded(operation: str, implementation: str) -> None:
    """Add an implementation that runs to what `implementations_recorded` collects."""
    for ran in _RAN:
        ran.setdefault(operation, set()).add(implementation)


@contextmanager
def work_watched(watcher: Watcher) -> Iterator[None]:
    """Passes the work of the calls within the context that no operation of torch shows to `watcher`."""
    try:
        with watched_by(watcher):
            CHOICES.change()
            yield
    finally:
        CHOICES.change()


@contextmanager
def implementations_recorded() -> Iterator[Ran]:
    """Collects which implementations of which operations run within the context, in all threads."""
    ran: Ran = {}
    _RAN.append(ran)
    CHOICES.change()
    try:
        yield ran
    finally:
        _RAN[:] = [other for other in _RAN if other is not ran]
        CHOICES.change()


_MODE = [
    "auto"
]  # of the process, as torch.backends: all ranks of a run have the same option


def select(mode: str) -> None:
    """Choose the kernels of this process: "auto", or "torch" for torch's operations alone.

    Raises ConfigError for another mode.
    """
    if mode not in MODES:
        raise ConfigError(f"--kernels {mode} is not known: use {' or '.join(MODES)}.")
    _MODE[0] = mode
    CHOICES.change()


def is_selected(mode: str) -> bool:
    """Return whether these are the kernels of this process."""
    return _MODE[0] == mode


@contextmanager
def selected(mode: str) -> Iterator[None]:
    """`select` within the context."""
    before = _MODE[0]
    select(mode)
    try:
        yield
    finally:
        _MODE[0] = before


@functools.cache
def load_kernels(device: str = "cuda") -> None:
    """Import all modules that register kernels for a type of device, where the wing is installed.

    Those for CPUs come with all others.
    """
    if (kernels := KERNELS.find()) is not None:
        kernels.load_all()
    if device in GPU:
        GPU_KERNELS.find()


def _load_kernels_of(operation: Operation, device: str, dtype: torch.dtype) -> None:
    """Import the modules that register kernels of an operation."""
    if (kernels := KERNELS.find()) is not None:
        kernels.load(operation.name, dtype)
    if device in GPU:
        GPU_KERNELS.find()


@functools.cache
def _candidates(
    operation: Operation, device: str, dtype: torch.dtype, mode: str
) -> list[Implementation]:
    _load_kernels_of(operation, device, dtype)
    return [
        entry
        for entry in operation.implementations
        if entry.name == "torch"
        or mode == "auto"
        and (entry.devices is None or device in entry.devices)
        and (entry.dtypes is None or dtype in entry.dtypes)
        and not (device != "meta" and _reason_against(operation, entry, device, dtype))
    ]


# Type of device → function (operation, implementation, dtype) → why this machine must not use it, "" if it
# may. An implementation of a type of device in this table runs only after its check.
CHECKS_BEFORE_USE: dict[
    str, Callable[[Operation, Implementation, torch.dtype], str]
] = {}


def _reason_against(
    operation: Operation, entry: Implementation, device: str, dtype: torch.dtype
) -> str:
    """Return why this machine cannot use an implementation. On a GPU it must first equal torch's operations."""
    check = CHECKS_BEFORE_USE.get(device, lambda *_: "")
    return entry.available() or check(operation, entry, dtype)


@functools.cache
def _log_once(operation: str, name: str, reason: str) -> None:
    logger.info(
        "kernel %s: %s does not take these arguments (%s); torch's operations run instead",
        operation,
        name,
        reason,
    )


def kernels_text(ran: Ran) -> str:
    """Return the implementations of the operations of a step, in one line of the log.

    kernels: attention c++, gelu c++ or torch; affine, layer_norm, product by torch
    """
    own = []
    by_torch = []
    for operation, names in sorted(ran.items()):
        if names == {"torch"}:
            by_torch.append(operation)
        else:
            own.append(f"{operation} {' or '.join(sorted(names))}")
    parts = []
    if own:
        parts.append(", ".join(own))
    if by_torch:
        parts.append(f"{', '.join(by_torch)} by torch")
    return f"kernels: {'; '.join(parts)}"
