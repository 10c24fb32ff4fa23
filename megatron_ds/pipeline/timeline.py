"""`Timeline`: when the instructions of a rank ran.

Measured times are seconds since 1970, comparable between the ranks of one machine, and of machines with
synchronised clocks. On GPUs they are events on the stream: they show when the device worked, and the host
waits for them only in `read`.
"""

import time

import torch

from ..mpu.host_reads import wait_until
from .instruction import Instruction

Entry = tuple[Instruction, float, float]  # instruction, start, end; in seconds


class Timeline:
    """Records the instructions of one rank on `device`."""

    def __init__(self, device: torch.device):
        self._entries: list[tuple] = []
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._zero = self.now()
            wait_until(self._zero.query)
            self._epoch = time.time()
        else:
            self._epoch = time.time() - time.perf_counter()

    def now(self):
        """Return a time stamp, for `add` alone."""
        if not self._is_cuda:
            return time.perf_counter()
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record()
        return stamp

    def add(self, instruction: Instruction, start) -> None:
        """`instruction` began at the stamp `start` and ends now."""
        self._entries.append((instruction, start, self.now()))

    def read(self) -> list[Entry]:
        """Return the entries since the last call, in seconds since 1970. The host waits for the device."""
        entries = self._entries
        self._entries = []
        read = []
        for instruction, start, end in entries:
            if self._is_cuda:
                wait_until(end.query)
            read.append((instruction, self._seconds(start), self._seconds(end)))
        return read

    def _seconds(self, stamp) -> float:
        """Seconds since 1970 of a stamp of `now`."""
        if self._is_cuda:
            stamp = self._zero.elapsed_time(stamp) / 1e3
        return self._epoch + stamp
