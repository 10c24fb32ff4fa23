"""Did all data-parallel ranks receive gradients for the same parameters? Found out with the norm, at no message of its own.

A rank that took another path through the model than its peers trains on a sum in which its part is missing. The ranks' sets of
parameters are compared by a fingerprint of 16 bits; only when these differ is anything exchanged by name.
"""

import zlib
from collections.abc import Mapping

from ..errors import MegatronDSError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group


def fingerprint(received: Mapping[str, bool]) -> tuple[float, float]:
    """(f, f²) of which parameters received gradients; sums over a thousand ranks are exact in float64."""
    f = zlib.crc32(bytes(received.values())) & 0xFFFF
    return f, f * f


def tell_divergence(received: Mapping[str, bool], data: Group, model: Group) -> None:
    """Raise, on all ranks, an error that names a parameter and the ranks on either side. Collective over both groups."""
    first = None
    everybody = all_gather_object(dict(received), data)
    for name in received:
        without = [rank for rank, theirs in zip(data.ranks, everybody) if not theirs[name]]
        if without and len(without) < data.size:
            having = set(data.ranks) - set(without)
            first = f"{name} received a gradient on rank(s) {_list(having)} but not on {_list(without)}"
            break
    what = next((text for text in all_gather_object(first, model) if text), "their sets of parameters with a gradient differ")
    raise MegatronDSError(f"data-parallel ranks took different paths through the model: {what}. The sum of their gradients "
                          "would be incomplete. Every rank must use the same parameters in each step, if necessary with a "
                          "factor of zero.")


def _list(ranks) -> str:
    ranks = sorted(ranks)
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
