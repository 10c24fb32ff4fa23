"""`deepspeed.accelerator`: questions of a program about its device, for programs that call
`get_accelerator()`.

    device = get_accelerator().device_name(engine.local_rank)           # "cuda:1", or "cpu"
"""

import torch


class Accelerator:
    """CUDA where torch finds it, else the CPU; names that are not here are those of torch.cuda or torch.cpu.
    """

    def device_name(self, device_index: int | None = None) -> str:
        """ "cpu" has no index: all local ranks share it. """
        name = self._name()
        return name if device_index is None or name == "cpu" else f"{name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._name() == "cuda" else None)

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return "nccl" if self._name() == "cuda" else "gloo"

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return self._name() == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)         # of all devices

    def __getattr__(self, name: str):
        return getattr(getattr(torch, self._name()), name)

    @staticmethod
    def _name() -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    return _ACCELERATOR
