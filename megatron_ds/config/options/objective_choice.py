"""`ObjectiveChoice`: what the core asks of a section of the configuration that may replace the loss of the model.

The class here is the section of a package without the wing: no options, and no effect. The sections of
extensions/preference and extensions/distillation are derived from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectiveChoice:
    """Whether the loss of a run is that of a wing."""

    @property
    def is_on(self) -> bool:
        """Whether data and loss are those of the wing."""
        return False
