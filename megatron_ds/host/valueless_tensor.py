"""`ValuelessTensor`: how kernels know the tensors of a plan for CPUs, without the machinery that makes them."""

import torch


class ValuelessTensor(torch.Tensor):
    """A tensor that reports a CPU and has no values: a `FakeCpuTensor` (fake_cpu.py)."""
