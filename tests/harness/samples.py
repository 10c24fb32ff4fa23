"""Few cases of a product of options, where the options do not depend on each other.

Where they do, `covering.py` finds the cases in which every pair of values appears. Of costly tests with many
cases, marked `parts(n)`, `make test` runs an n-th, another one each day.
"""

import itertools
import os
from collections.abc import Sequence

ALL = bool(os.environ.get("MEGATRON_DS_TEST_ALL"))
PART = os.environ.get("MEGATRON_DS_TEST_PART", "")


def in_turns(*axes: Sequence) -> list[tuple]:
    """The cases are as many as the longest axis has values; the values of the others take turns. `make test-all` has
    the whole product."""
    if ALL:
        return list(itertools.product(*axes))
    most = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(most)]


def left_for_other_parts(tests: Sequence[tuple[str, int]], part: int) -> list[int]:
    """Positions of the cases that this part leaves out.

    tests: for each case, the name of its test and the n of its marker `parts(n)`, 1 without one; with
    `parts(n, together=True)` the name of its file. Part p has every n-th case of a name, so each name has a case in
    every part, and n parts in a row have all cases.
    """
    cases: dict[str, list[int]] = {}
    for position, (name, _) in enumerate(tests):
        cases.setdefault(name, []).append(position)
    left = []
    for positions in cases.values():
        parts = min(tests[positions[0]][1], len(positions))
        left += [p for i, p in enumerate(positions) if i % parts != part % parts]
    return left
