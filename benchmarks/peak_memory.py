"""Resident memory of this process, in MiB."""

import ctypes
import resource
import sys
from pathlib import Path


def resident_mib() -> float:
    """What is resident now; where the system does not report it, the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_mib()
    line = next(
        line for line in status.read_text().splitlines() if line.startswith("VmRSS:")
    )
    return int(line.split()[1]) / 1024


def peak_mib() -> float:
    """The most since the start, or since `forget_peak`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def forget_peak() -> None:
    """Start the peak anew, after giving back what is free: building a model leaves arrays behind. Linux only."""
    if sys.platform.startswith("linux"):
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass  # not allowed everywhere: the peak then includes the building
