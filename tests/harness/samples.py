"""Few cases of a product of options, where the options do not depend on each other, and the sets of tests.

Where options do depend on each other, `covering.py` finds the cases in which every pair of values appears.
"""

import itertools
import os
from collections.abc import Sequence

ALL = bool(os.environ.get("MEGATRON_DS_TEST_ALL"))


def in_turns(*axes: Sequence) -> list[tuple]:
    """The cases are as many as the longest axis has values; the values of the others take turns. `make test-all` has
    the whole product."""
    if ALL:
        return list(itertools.product(*axes))
    most = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(most)]


def left_for_rest(tests: Sequence[tuple[str, int]]) -> list[int]:
    """Return the positions of the cases that `make test` leaves to `make test-rest`.

    tests: for each case, the name of its test and the n of its marker `one_in(n)`, 1 without one; with
    `one_in(n, together=True)` the name of its file. Of n cases in a row one is kept: of the first n the first, of the
    next n the second and so on, so that an axis of n values has each of them in turn.
    """
    cases: dict[str, list[int]] = {}
    for position, (name, _) in enumerate(tests):
        cases.setdefault(name, []).append(position)
    left = []
    for positions in cases.values():
        n = tests[positions[0]][1]
        left += [p for i, p in enumerate(positions) if i % n != i // n % n]
    return left
