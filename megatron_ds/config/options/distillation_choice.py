"""`Distillation`: what the core asks of the section of the configuration that trains with a teacher.

The class here is the section of a package without extensions/distillation: no options, and no effect. The section of
that wing is derived from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Distillation:
    """Whether the loss compares the model with a teacher."""

    @property
    def is_on(self) -> bool:
        """Whether the loss is that of the wing."""
        return False
