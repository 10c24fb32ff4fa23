"""`Loaders`: the data of a run."""

from dataclasses import dataclass
from typing import Any

from .batches import BatchSource


@dataclass(frozen=True)
class Loaders:
    """Train, validation and test data of a run; the last two may be None."""

    train: BatchSource
    valid: BatchSource | None = None
    test: BatchSource | None = None

    def compare(self) -> None:
        """Compare what ranks with copies of their own read (a feature has it). Collective over the world."""
        loaders: tuple[Any, ...] = (self.train, self.valid, self.test)
        for loader in loaders:
            if hasattr(loader, "compare"):
                loader.compare()
