"""`GradientChecksum`: the gradients that a rank computed in a step, in one number.

It is the sum of their bit patterns, read as integers, before they are summed over ranks. One flipped bit changes
it, and the order in which buckets fill up does not. It stays on the device: nothing waits for it.
"""

import torch

WORDS = {2: torch.int16, 4: torch.int32}  # bytes of an element → integer of its bits


class GradientChecksum:
    """total: int64 scalar, of the buckets since `begin`."""

    def __init__(self, device: torch.device):
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """A step begins."""
        self.total.zero_()

    def add(self, whole: torch.Tensor) -> None:
        """Add the gradients of a bucket, [numel]."""
        self.total += whole.view(WORDS[whole.itemsize]).sum()
