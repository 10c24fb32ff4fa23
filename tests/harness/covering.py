"""Covering arrays: few cases in which every pair of option values still appears together.

Most faults of a composition need two options to meet. Greedy, as AETG does it (Cohen et al. 1997, IEEE TSE 23(7)): take the
case with the most pairs that no case had before.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

Case = Mapping[str, object]


def legal_cases(options: Mapping[str, Sequence], is_legal: Callable[[Case], bool] = lambda case: True) -> list[dict]:
    """The product of all options' values, without the illegal combinations."""
    cases = (dict(zip(options, values)) for values in itertools.product(*options.values()))
    return [case for case in cases if is_legal(case)]


def cover_pairs(cases: Sequence[Case], cost: Callable[[Case], float] = lambda case: 0,
                chosen: Sequence[Case] = ()) -> list[Case]:
    """`chosen` and some of `cases` that together hold every pair of values that any of `cases` holds.

    cost: what a case takes; cheap ones are preferred where there is a choice. Deterministic: of equally good cases the first.
    """
    numbers: dict[tuple, int] = {}
    masks = [_mask(case, numbers) for case in cases]
    missing = (1 << len(numbers)) - 1
    result = list(chosen)
    for case in chosen:
        missing &= ~_mask(case, numbers)
    while missing:
        best = max(range(len(cases)), key=lambda i: ((masks[i] & missing).bit_count(), -cost(cases[i])))  # noqa: B023
        result.append(cases[best])
        missing &= ~masks[best]
    return result


def _mask(case: Case, numbers: dict[tuple, int]) -> int:
    """The case's pairs as bits; `numbers` gives each pair its bit."""
    return sum(1 << numbers.setdefault(pair, len(numbers)) for pair in itertools.combinations(case.items(), 2))
