"""`Timeline`: when the instructions of a rank really ran.

Seconds since 1970, so that the ranks of one machine, and of machines with synchronised clocks, can be laid side by side. On
GPUs the stamps are events on the stream: they tell when the device worked, and nobody waits for them before `read`.
"""

import time

import torch

from .instruction import Instruction

Entry = tuple[Instruction, float, float]         # what, start, end


class Timeline:
    def __init__(self, device: torch.device):
        self._entries: list[tuple] = []
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.synchronize(device)
            self._zero = self.now()
            self._epoch = time.time()
        else:
            self._epoch = time.time() - time.perf_counter()

    def now(self):
        """A stamp; what it is is nobody's business but ours."""
        if not self._is_cuda:
            return time.perf_counter()
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record()
        return stamp

    def add(self, instruction: Instruction, start) -> None:
        """`instruction` began at the stamp `start` and ends now."""
        self._entries.append((instruction, start, self.now()))

    def read(self) -> list[Entry]:
        """What was added, and begin anew."""
        entries, self._entries = self._entries, []
        if self._is_cuda:
            torch.cuda.synchronize()
        return [(i, self._seconds(start), self._seconds(end)) for i, start, end in entries]

    def _seconds(self, stamp) -> float:
        return self._epoch + (self._zero.elapsed_time(stamp) / 1e3 if self._is_cuda else stamp)
