"""`deepspeed.utils.pin_memory_tracker`: a count of page-locked memory that a program reports.

The engine reports nothing to it: a plan (`--dry-run`) has the page-locked bytes of this package.
"""

from logging import getLogger

GB = 2**30
FIRST = 32 * GB  # the first amount that is logged; then each doubling
UNITS = ((GB, "GB", 2), (2**20, "MB", 2), (2**10, "KB", 1))
logger = getLogger("DeepSpeed")  # where programs look for it


class _Tracker:
    """The bytes and calls since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was reported."""
        self._bytes = self._calls = 0
        self._next_checkpoint = FIRST

    def track(self, num_bytes: int) -> None:
        """Add an allocation; log once when one amount or more is passed."""
        self._bytes += num_bytes
        self._calls += 1
        passed = None
        while self._bytes >= self._next_checkpoint:
            passed = self._next_checkpoint
            self._next_checkpoint *= 2
        if passed is not None:
            logger.info(
                "page-locked memory: checkpoint %s passed, %s in %d allocations",
                _fmt_bytes(passed),
                _fmt_bytes(self._bytes),
                self._calls,
            )


_tracker = _Tracker()


def track_pinned_memory(num_bytes: int) -> None:
    """Report an allocation."""
    _tracker.track(int(num_bytes))


def pinned_memory_summary(tag: str = "") -> None:
    """Log the sum so far."""
    where = f" {tag}" if tag else ""
    logger.info(
        "page-locked memory%s: %s in %d allocations",
        where,
        _fmt_bytes(_tracker._bytes),
        _tracker._calls,
    )


def _fmt_bytes(num_bytes: int) -> str:
    for size, unit, digits in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"
