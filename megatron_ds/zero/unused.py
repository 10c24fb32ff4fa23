"""Parameters without a gradient: what an update does where a rank has not used a parameter.

    "same"      the data-parallel ranks must leave out the same ones, whose gradients are zero
    "zeros"     each rank may leave out others: its part of the sum is zero
    "refused"   no rank may leave out any

A number that each rank computes from what it received travels with the norm of the gradients, so the check
costs no message of its own. Only where ranks differ, they exchange names.
"""

import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Literal

from ..errors import MegatronDSError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group

Rule = Literal["same", "zeros", "refused"]
MOST_NAMED = 8
logger = logging.getLogger(__name__)


def number_of(received: Mapping[str, bool], rule: Rule) -> int:
    """A number below 2^16 to compare over the ranks: how many are missing if any is refused, else a
    fingerprint."""
    if rule == "refused":
        return min(len(received) - sum(received.values()), 0xFFFF)
    return zlib.crc32(bytes(received.values())) & 0xFFFF


def report_unused(received: dict[str, bool], data: Group, model: Group, rule: Rule) -> None:
    """Raise an error that names parameters and the ranks without them; if they count as zeros, warn on the
    first rank. Collective over the groups.
    """
    of_ranks = all_gather_object(dict(received), data)
    without = {name: [rank for rank, theirs in zip(data.ranks, of_ranks) if not theirs[name]]
               for name in reversed(received)}      # as in forward: buckets are in the order of backward
    chosen = _refused(without) if rule == "refused" else _different(without, data)
    found = next((text for text in all_gather_object(chosen, model) if text),
                 "the parameters with a gradient differ")
    if rule == "refused":
        raise MegatronDSError(
            f"{found}. \"ignore_unused_parameters\" is false, which makes unused parameters an error. Use "
            "them in the loss, freeze them with requires_grad_(False), or set it to true: gradients are then "
            "zero where a parameter is not used.")
    if rule == "same":
        raise MegatronDSError(
            f"data-parallel ranks took different paths through the model: {found}. The sum of their "
            "gradients would be incomplete. Every rank must use the same parameters in each step, if "
            "necessary with a factor of zero.")
    if data.rank == model.rank == 0:
        logger.warning("%s: the gradient of a parameter is zero on ranks that do not use it, in this and in "
                       "later updates", found)


def _different(without: Mapping[str, list[int]], data: Group) -> str | None:
    """The first parameter that some of the ranks have not used."""
    for name, ranks in without.items():
        if ranks and len(ranks) < data.size:
            having = set(data.ranks) - set(ranks)
            return f"{name} received a gradient on rank(s) {_list(having)} but not on {_list(ranks)}"
    return None


def _refused(without: Mapping[str, list[int]]) -> str | None:
    """The parameters that a rank has not used."""
    missing = [f"{name} on rank(s) {_list(ranks)}" for name, ranks in without.items() if ranks]
    if not missing:
        return None
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return (f"{len(missing)} of {len(without)} parameters received no gradient in this update: "
            f"{', '.join(missing[:MOST_NAMED])}{more}")


def _list(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(str, ranks[:MOST_NAMED])) + more
