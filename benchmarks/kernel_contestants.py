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

TINY = (8, 64)  # rows, width


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


def leaf(t: torch.Tensor) -> torch.Tensor:
    """A copy with contiguous memory of its own, which requires gradients."""
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments of Liger's SwiGLU: gate and up are two tensors, which its backward overwrites."""
    gate, up = x.chunk(2, dim=-1)
    return leaf(gate), leaf(up)


def heads_apart(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    """Arguments of Liger's rotary embedding: the last head of x [s, b, n, d] as keys, the others as queries
    [b, n, s, d] in memory [b, s, n, d], which it overwrites. It rotates whole heads, also where the example
    rotates a part of each: the bytes are the same."""
    queries, keys = (
        leaf(t.transpose(0, 1)).transpose(1, 2)
        for t in x.split((x.shape[2] - 1, 1), dim=2)
    )
    tables = x.new_ones(2, 1, len(x), x.shape[-1])
    return queries, keys, *tables


def whole_loss(logits: torch.Tensor, labels: torch.Tensor, *others: Any) -> tuple:
    """Arguments of Liger's cross entropy. Its forward computes the loss and writes the gradient over the
    logits: as much as our two operations together. Labels of other ranks are ignored."""
    valid = (labels >= 0) & (labels < logits.shape[1])
    return (
        leaf(logits),
        torch.where(valid, labels, -100),
        None,
        None,
        -100,
        None,
        "sum",
        0.1,
    )


LIGER = {
    "rms_norm": Liger("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
    "layer_norm": Liger("liger_kernel.ops.layer_norm", "LigerLayerNormFunction"),
    "swiglu": Liger("liger_kernel.ops.swiglu", "LigerSiLUMulFunction", halves),
    "apply_rotary": Liger(
        "liger_kernel.ops.rope",
        "LigerRopeFunction",
        heads_apart,
        lambda result: result[:2],
    ),
    "cross_entropy_gradient_": Liger(
        "liger_kernel.transformers.functional",
        "liger_cross_entropy",
        whole_loss,
        lambda loss: loss.detach(),
    ),
}  # backward: none is left


def has_own(operation: Operation, device: torch.device) -> bool:
    """Whether a type of device has implementations of ours, before they are checked."""
    return any(
        entry.devices is None or device.type in entry.devices
        for entry in operation.implementations
        if entry.name != "torch"
    )


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
    return [
        i for i, (t, version) in enumerate(zip(given, before)) if t._version != version
    ]
