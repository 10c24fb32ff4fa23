"""A bound for what unpickled values hold when each reference to a shared value counts.

A pickle of n references can describe 2**n elements: a1 = [a0, a0], a2 = [a1, a1], … Printing, comparing or
copying such a value takes that long; values nested very deep overflow the stack.
"""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

MOST_DEPTH = 200
SPARE = 1_000_000  # elements of any pickle
TIMES = 10  # elements of a larger pickle, as a multiple of its bytes


def check_nesting(
    content: Any, nbytes: int, parts_of: Callable[[Any], Iterable | None]
) -> None:
    """Raises UnpicklingError for content that is nested deeper than 200 levels, or whose elements are many times the
    bytes of its pickle.

    parts_of: returns the elements of a value; None for a value without elements. A value inside of itself counts
    once
    """
    most = SPARE + TIMES * nbytes
    # id → (elements, levels): memoized, so that each value is visited once.
    measured: dict[int, tuple[int, int]] = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        parts = parts_of(value)
        if parts is None:
            return 1, 0
        elements, levels = measured.get(id(value), (0, 0))
        if depth + levels > MOST_DEPTH:
            raise pickle.UnpicklingError(
                f"its values are nested deeper than {MOST_DEPTH} levels"
            )
        if not elements:
            measured[id(value)] = elements, levels = 1, 0
            for part in parts:
                more, deeper = measure(part, depth + 1)
                elements += more
                levels = max(levels, deeper + 1)
            measured[id(value)] = elements, levels
        if elements > most:
            raise pickle.UnpicklingError(
                f"it refers to the same values so often that it stands for over {most:,} "
                f"elements, and the pickle has {nbytes:,} bytes"
            )
        return elements, levels

    measure(content, 0)
