"""`PathCheck`: what an update does where data-parallel ranks took different paths through the model.

    "same"      they must use the same parameters, else the update is an error
    "zeros"     each rank may leave out parameters, whose gradients are zero there
    "refused"   no rank may leave out any

Ranks that gather parameters for each layer (stage 3) must call the same layers in the same order, under every
rule: collectives of different layers would pair up, and layers of equal size get each other's weights.

A number that each rank computes from its path travels with the norm of the gradients, so the check costs no
message of its own. Only where ranks differ, they exchange names.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

from ..mpu.group import Group

Rule = Literal["same", "zeros", "refused"]


class PathCheck:
    """The check of one rank. data, model: its groups. paths: the layers that stages used, if noted."""

    def __init__(
        self, rule: Rule, data: Group, model: Group, paths: Sequence[Sequence[str]]
    ):
        self.rule = rule
        self._data = data
        self._model = model
        self._paths = paths
        self._has_warned = False

    def number(self, received: Mapping[str, bool]) -> float:
        """Return a fingerprint below 2^16, equal on all ranks if their paths are; infinite where a parameter
        received no gradient and that is refused.

        It is that of the layers if they are known, and of the parameters unless each rank may leave out some.
        """
        if self.rule == "refused" and not all(received.values()):
            return math.inf
        seen = "\n".join(self._path()).encode()
        if self.rule != "zeros" or not seen:
            seen += bytes(received.values())
        return zlib.crc32(seen) & 0xFFFF

    def report(self, received: dict[str, bool]) -> None:
        """Raise the error, which names parameters or layers and ranks; where gradients count as zeros, warn
        on the first rank, once. Collective over the groups.
        """
        if self._has_warned:
            return
        from .path_report import report_paths  # only where ranks differ

        report_paths(self.rule, received, self._path(), self._data, self._model)
        self._has_warned = True

    def _path(self) -> list[str]:
        return [layer for path in self._paths for layer in path]
