"""`Preference`: what the core asks of the section of the configuration that trains on pairs of answers.

The class here is the section of a package without extensions/preference: no options, and no effect. The section of
that wing is derived from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preference:
    """Whether samples are pairs of answers, of which one is preferred."""

    @property
    def is_on(self) -> bool:
        """Whether data and loss are those of the wing."""
        return False
