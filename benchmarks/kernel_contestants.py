"""What `benchmarks/kernels.py` compares: an operation as a run calls it, torch's operations, those compiled
by torch.compile, and Liger's kernels where the package is installed.

    ours             the first implementation of the table, only where the device has one of ours
    torch            torch's operations, one by one
    liger            LIGER has the operations, and how Liger wants the arguments
    torch.compile    last: a compilation takes seconds

A contestant has arguments of its own where it changes them, else those of the example.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks.kernel_clock import tensors_of
from megatron_ds.ops.kernel_table import Operation, selected

TINY = (8, 64)             # rows, width


@dataclass(frozen=True)
class Contestant:
    """function: of the arguments that `arguments` makes of an example."""

    function: Callable[..., Any]
    arguments: Callable[[tuple], tuple]


@dataclass(frozen=True)
class Liger:
    """A function, or autograd Function, of Liger. arguments: of its call, made of those of our operation;
    result: what is timed of its result."""

    module: str
    name: str
    arguments: Callable[..., tuple] = lambda *arguments: arguments
    result: Callable[[Any], Any] = lambda result: result

    def load(self) -> Callable[..., Any]:
        """The function. Raises ImportError without Liger, AttributeError if its name has changed."""
        found = getattr(importlib.import_module(self.module), self.name)
        call = getattr(found, "apply", found)
        return lambda *arguments: self.result(call(*arguments))


LIGER = {
    "rms_norm": Liger("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    "layer_norm": Liger("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")}


def has_own(operation: Operation, device: torch.device) -> bool:
    """Whether a type of device has implementations of ours, before they are checked."""
    return any(entry.devices is None or device.type in entry.devices
               for entry in operation.implementations if entry.name != "torch")


def names_of(operation: Operation, device: torch.device) -> Iterator[str]:
    """The contestants of an operation that need no compilation."""
    if has_own(operation, device):
        yield "ours"
    yield "torch"
    if operation.name in LIGER and has_liger():
        yield "liger"


def has_liger() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def contestant(operation: Operation, name: str, dtype: torch.dtype) -> Contestant:
    """By its name. Raises ImportError or AttributeError for a Liger of another version."""
    if name == "liger":
        liger = LIGER[operation.name]
        return Contestant(liger.load(), lambda example: liger.arguments(*example))
    own = partial(own_arguments, operation, dtype)
    if name == "ours":
        return Contestant(operation, own)
    if name == "torch.compile":
        return Contestant(torch.compile(operation.in_torch, dynamic=False), own)

    def eager(*arguments: Any) -> Any:
        with selected("torch"):
            return operation.in_torch(*arguments)

    return Contestant(eager, own)


def own_arguments(operation: Operation, dtype: torch.dtype, example: tuple) -> tuple:
    """The example with copies of the tensors that the operation changes."""
    given = tensors_of(example)
    copies = {id(given[i]): given[i].clone() for i in written(operation, dtype)}
    return tree_map(lambda value: copies.get(id(value), value), example)


@cache
def written(operation: Operation, dtype: torch.dtype) -> list[int]:
    """Which of the tensors in its arguments the operation changes, by torch's count of changes."""
    example = operation.make_example(*TINY, dtype, torch.device("cpu"))
    given = tensors_of(example)
    before = [t._version for t in given]
    with selected("torch"):
        operation.in_torch(*example)
    return [i for i, (t, version) in enumerate(zip(given, before)) if t._version != version]
