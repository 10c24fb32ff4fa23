"""`Setting`: one value given by somebody, before the sources are merged."""

from dataclasses import dataclass
from typing import Any

from .run import Source


@dataclass(frozen=True)
class Setting:
    """`value` is of the option's type already, or a `PartOf`."""

    path: str
    value: Any
    source: Source


@dataclass(frozen=True)
class PartOf:
    """A value that is a part of another option's, known only when all sources are merged."""

    path: str
    part: float

    def __str__(self) -> str:
        return f"{self.part:g} × {self.path.split('.')[1]}"
