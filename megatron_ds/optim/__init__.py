"""Inner optimizers by name."""

from .optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS"]
