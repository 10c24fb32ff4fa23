"""Copies between host and GPU for which the host does not wait.

`torch.tensor(numbers, device="cuda")` and `.to("cuda")` from ordinary memory make the host wait until the
stream has reached the copy: a training step of several hundred milliseconds would be launched anew after each
of them. From page-locked memory a copy is queued like a kernel; torch's host allocator reuses the memory only
when the copy is over.
"""

import torch


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on the device; the tensor itself where the device is the CPU. The host does not wait."""
    if device.type == "cpu":
        return numbers
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(
        device, non_blocking=True
    )


def column(scalars: list[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Numbers, and scalars on the device, in one tensor, float64 [len(scalars)]. The host does not wait."""
    tensors = {i: x for i, x in enumerate(scalars) if isinstance(x, torch.Tensor)}
    known = torch.tensor(
        [0.0 if i in tensors else float(x) for i, x in enumerate(scalars)],
        dtype=torch.float64,
    )
    out = on_device(known, device)
    if tensors:
        places = out.unbind()
        torch._foreach_copy_([places[i] for i in tensors], list(tensors.values()))
    return out
