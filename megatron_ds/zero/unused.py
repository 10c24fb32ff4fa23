"""`PathCheck`: what an update does where data-parallel ranks took different paths through the model.

    "same"      they must use the same parameters, else the update is an error
    "zeros"     each rank may leave out parameters, whose gradients are zero there
    "refused"   no rank may leave out any

Ranks that gather parameters for each layer (stage 3) must call the same layers in the same order, under every
rule: collectives of different layers would pair up, and layers of equal size get each other's weights.

A number that each rank computes from its path travels with the norm of the gradients, so the check costs no
message of its own. Only where ranks differ, they exchange names.
"""

import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ..errors import CallError, CommunicationError, MegatronDSError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group

Rule = Literal["same", "zeros", "refused"]
MOST_NAMED = 8
logger = logging.getLogger(__name__)


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
        # Which ranks have no gradient of which parameter.
        of_ranks = all_gather_object(dict(received), self._data)
        # In the order of forward, which is the reverse of that of the buckets.
        without = {
            name: [
                rank
                for rank, theirs in zip(self._data.ranks, of_ranks)
                if not theirs[name]
            ]
            for name in reversed(received)
        }
        chosen = (
            _refused(without)
            if self.rule == "refused"
            else _different(without, self._data)
        )
        found = self._first(chosen)
        # Errors: any unused parameter, layers out of order, then different paths.
        if self.rule == "refused" and found:
            raise CallError(
                f'{found}. "ignore_unused_parameters" is false, which makes unused parameters an error. '
                "Use them in the loss, freeze them with requires_grad_(False), or set it to true: gradients "
                "are then zero where a parameter is not used."
            )
        if path := self._path():
            self._report_layers(path)
        found = found or "the parameters with a gradient differ"
        if self.rule != "zeros":
            raise MegatronDSError(
                f"data-parallel ranks took different paths through the model: {found}. The sum of their "
                "gradients would be incomplete. Every rank must use the same parameters in each step, if "
                "necessary with a factor of zero."
            )
        self._has_warned = True
        if self._data.rank == self._model.rank == 0:
            logger.warning(
                "%s: the gradient of a parameter is zero on ranks that do not use it, in this and "
                "in later updates",
                found,
            )

    def _path(self) -> list[str]:
        return [layer for path in self._paths for layer in path]

    def _report_layers(self, path: Sequence[str]) -> None:
        found = self._first(
            _first_difference(
                all_gather_object(list(path), self._data), self._data.ranks
            )
        )
        raise CommunicationError(
            f"data-parallel ranks used different layers, or in another order: {found or 'on other ranks'}. "
            "What they gathered belongs to other layers, so nothing was updated."
        )

    def _first(self, text: str | None) -> str | None:
        """Return the text of the first model-parallel rank that has one."""
        return next(filter(None, all_gather_object(text, self._model)), None)


def _first_difference(
    paths: Sequence[Sequence[str]], ranks: Sequence[int]
) -> str | None:
    for at in range(max(map(len, paths))):
        here = [path[at] if at < len(path) else "no layer" for path in paths]
        other = next((i for i, layer in enumerate(here) if layer != here[0]), None)
        if other is not None:
            return f"rank {ranks[0]} used {here[0]} where rank {ranks[other]} used {here[other]}"
    return None


def _different(without: Mapping[str, list[int]], data: Group) -> str | None:
    """Return the first parameter that some of the ranks have not used."""
    for name, ranks in without.items():
        if ranks and len(ranks) < data.size:
            having = set(data.ranks) - set(ranks)
            return f"{name} received a gradient on rank(s) {_list(having)} but not on {_list(ranks)}"
    return None


def _refused(without: Mapping[str, list[int]]) -> str | None:
    """Return the parameters that a rank has not used."""
    missing = [
        f"{name} on rank(s) {_list(ranks)}" for name, ranks in without.items() if ranks
    ]
    if not missing:
        return None
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return (
        f"{len(missing)} of {len(without)} parameters received no gradient in this update: "
        f"{', '.join(missing[:MOST_NAMED])}{more}"
    )


def _list(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more
