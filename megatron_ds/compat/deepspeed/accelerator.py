"""`deepspeed.accelerator`: the device of this process, for programs that call `get_accelerator()`.

    device = get_accelerator().device_name(engine.local_rank)           # "cuda:1", or "cpu"

Names that torch.cuda has and torch.cpu lacks have an answer on the CPU, too: `ON_CPU`.
"""

import os
import resource
from collections.abc import Callable
from typing import Any

import torch

from ... import foreign_name


def _resident() -> int:
    """Resident memory of this process, in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _largest_resident()


def _largest_resident() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _total() -> int:
    """Memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available() -> int:
    """Free memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _nothing(*args: Any, **options: Any) -> None:
    """No effect."""


# Name of torch.cuda that torch.cpu lacks → its answer. Arguments are those of torch.cuda.
ON_CPU: dict[str, Callable[..., Any]] = {
    "memory_allocated": lambda device=None: _resident(),
    "max_memory_allocated": lambda device=None: _largest_resident(),
    "memory_reserved": lambda device=None: _resident(),
    "max_memory_reserved": lambda device=None: _largest_resident(),
    "memory_stats": lambda device=None: {},
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "Event": _nothing,
    "default_stream": lambda device=None: None,
    "is_current_stream_capturing": lambda: False,
}
# DeepSpeed's name → torch's.
FORMER = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
TENSORS = (
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
)


class Accelerator:
    """CUDA if torch finds a GPU, else the CPU. Other attributes are those of torch.cuda or torch.cpu."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of the device, with its index if it is a GPU: all local ranks share "cpu"."""
        name = self._name()
        return (
            name if device_index is None or name == "cpu" else f"{name}:{device_index}"
        )

    def current_device_name(self) -> str:
        """Return the name of torch's current device."""
        return self.device_name(
            torch.cuda.current_device() if self._name() == "cuda" else None
        )

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device of this name."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for tensors on this device."""
        return "nccl" if self._name() == "cuda" else "gloo"

    def is_available(self) -> bool:
        """True: there is always a CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether operations are complete when their call returns."""
        return self._name() == "cpu"

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return self._name() == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16: all do."""
        return True

    def is_triton_supported(self) -> bool:
        """Return whether the device runs Triton's kernels."""
        return self._name() == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Number formats in which the device computes."""
        return [
            torch.float32,
            torch.float16,
            *([torch.bfloat16] if self.is_bf16_supported() else []),
        ]

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the device, in bytes."""
        if self._name() == "cpu":
            return _total()
        index = torch.cuda.current_device() if device_index is None else device_index
        return torch.cuda.get_device_properties(index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Free memory of the device, in bytes."""
        return (
            _available()
            if self._name() == "cpu"
            else torch.cuda.mem_get_info(device_index)[0]
        )

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators of all devices."""
        torch.manual_seed(seed)

    def random(self) -> Any:
        """Return the module torch.random."""
        return torch.random

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in page-locked memory; the tensor itself without a GPU."""
        return tensor.pin_memory() if self._name() == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in page-locked memory."""
        return self._name() == "cuda" and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a device of this kind."""
        return tensor.device.type == self._name()

    def range_push(self, msg: str) -> None:
        """No effect: torch.profiler records operations without marks."""

    def range_pop(self) -> None:
        """No effect."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Return the result of the callback."""
        return callback()

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def get_compile_backend(self) -> str:
        """torch.compile's default backend."""
        return "inductor"

    def __getattr__(self, name: str) -> Any:
        kind = self._name()
        name = FORMER.get(name, name)
        module = getattr(torch, kind)
        if name in TENSORS:
            return getattr(module if kind == "cuda" else torch, name)
        if kind == "cpu" and name in ON_CPU and not hasattr(module, name):
            return ON_CPU[name]
        if not hasattr(module, name):
            raise AttributeError(
                f"the accelerator has no {name!r}: it has those of DeepSpeed's names that "
                f"megatron_ds.accelerator lists, and all of torch.{kind}"
            )
        return getattr(module, name)

    @staticmethod
    def _name() -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return _ACCELERATOR


def __getattr__(name: str) -> Any:
    return foreign_name("megatron_ds.accelerator", name)
