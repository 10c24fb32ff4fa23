"""Few cases of a product of options, where the options do not depend on each other.

Where they do, `covering.py` finds the cases in which every pair of values appears.
"""

import itertools
import os
from collections.abc import Sequence

ALL = bool(os.environ.get("MEGATRON_DS_TEST_ALL"))


def in_turns(*axes: Sequence) -> list[tuple]:
    """As many cases as the longest axis has values: the values of the others take turns. `make test-all` has
    the whole product."""
    if ALL:
        return list(itertools.product(*axes))
    most = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(most)]
