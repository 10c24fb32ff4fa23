"""Checkpoints of logical tensors: save under one layout, load under any other."""

from typing import Any

from .. import foreign_name


def __getattr__(name: str) -> Any:
    return foreign_name(__name__, name)
