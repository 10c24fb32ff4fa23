"""`deepspeed.accelerator`: the device of this process, for programs that call `get_accelerator()`.

    device = get_accelerator().device_name(engine.local_rank)           # "cuda:1", or "cpu"
"""

import torch


class Accelerator:
    """CUDA if torch finds a GPU, else the CPU. Other attributes are those of torch.cuda or torch.cpu."""

    def device_name(self, device_index: int | None = None) -> str:
        """The name of the device, with its index if it is a GPU: all local ranks share "cpu"."""
        name = self._name()
        return name if device_index is None or name == "cpu" else f"{name}:{device_index}"

    def current_device_name(self) -> str:
        """The name of torch's current device."""
        return self.device_name(torch.cuda.current_device() if self._name() == "cuda" else None)

    def device(self, device_index: int | None = None) -> torch.device:
        """The device of this name."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed for tensors on this device."""
        return "nccl" if self._name() == "cuda" else "gloo"

    def is_available(self) -> bool:
        """True: there is always a CPU."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return self._name() == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16: all do."""
        return True

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators of all devices."""
        torch.manual_seed(seed)

    def __getattr__(self, name: str):
        return getattr(getattr(torch, self._name()), name)

    @staticmethod
    def _name() -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return _ACCELERATOR
