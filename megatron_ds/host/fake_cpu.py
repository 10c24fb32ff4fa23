"""Tensors of a CPU that have shapes, dtypes and storages but no values: plans run the layers of a model on them.

    with FakeCpu():
        hidden = torch.empty(24, 1, 32)   # a FakeCpuTensor; so is every result of it

Operations run the code that torch has for the meta device, and the tensors report a CPU, so torch and the
layers choose the kernels that they choose on a CPU. torch's FakeTensorMode does the same for compilers, with
symbolic shapes and values that are known in advance, and takes twice as long for each operation.
"""

import functools
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from .dispatch_mode import DispatchMode
from .known_results import META, result_of
from .valueless_tensor import ValuelessTensor

CPU = torch.device("cpu")
DEVICE_OF = torch.ops.prim.device.default
# torch.tensor and torch.as_tensor call it with the values that they have read.
LIFT = torch.ops.aten.lift_fresh.default

# True while the code of an operation for the meta device runs, which must see tensors of that device.
_runs_meta_code = torch._C._meta_in_tls_dispatch_include


class FakeCpuTensor(ValuelessTensor):
    """A tensor on the meta device that reports a CPU. Reading its values is an error."""

    # torch documents these three members for subclasses; its stubs declare other forms of them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> "FakeCpuTensor":
        fake = torch.Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        return fake

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The CPU; the meta device for the code of an operation."""
        return META if _runs_meta_code() else CPU

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        return _run(function, args, kwargs or {})


class FakeCpu(DispatchMode):
    """A context in which new tensors on the CPU are FakeCpuTensors."""

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        return _run(function, args, kwargs or {})


def _run(function: OpOverload, args: tuple, kwargs: dict) -> object:
    """Run the operation's code for the meta device, and return its result as tensors of a CPU."""
    if function is DEVICE_OF:
        return args[0].device
    if function is LIFT:
        return FakeCpuTensor(args[0].to(META))
    if _takes_device(function) and (kwargs.get("device") or not _has_tensor(args)):
        kwargs = kwargs | {"device": META}
        kwargs.pop("pin_memory", None)
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        result = result_of(function, args, kwargs)
    return _as_fake(result, function)


@functools.cache
def _takes_device(function: OpOverload) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _has_tensor(args: tuple) -> bool:
    return any(isinstance(argument, torch.Tensor) for argument in args)


def _as_fake(result: object, function: OpOverload) -> object:
    """Return a result with its tensors as FakeCpuTensors; an operation in place returns one that exists already.

    Raises RuntimeError if the result is a tensor with values.
    """
    if isinstance(result, FakeCpuTensor) or not isinstance(
        result, (torch.Tensor, list, tuple)
    ):
        return result
    if not isinstance(result, torch.Tensor):
        return type(result)(_as_fake(part, function) for part in result)
    if not result.is_meta:
        raise RuntimeError(
            f"{function} writes to a tensor with values, but a plan has none to write. "
            "Make the tensor within the context of the plan."
        )
    return FakeCpuTensor(result)
