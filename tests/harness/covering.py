"""Covering arrays: few cases in which every pair of option values still appears together.

Most faults of a composition need two options to meet. Greedy, as AETG does it (Cohen et al. 1997, IEEE TSE
23(7)): take the case with the most pairs that no case had before.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Case = Mapping[str, object]


def legal_cases(options: Mapping[str, Sequence],
                is_legal: Callable[[Case], bool] = lambda case: True) -> list[dict]:
    """The product of all options' values, without the illegal combinations."""
    cases = (dict(zip(options, values)) for values in itertools.product(*options.values()))
    return [case for case in cases if is_legal(case)]


def cover_pairs(cases: Sequence[Case], cost: Callable[[Case], float] = lambda case: 0,
                chosen: Sequence[Case] = ()) -> list[Case]:
    """`chosen` and some of `cases` that together hold every pair of values that any of `cases` holds.

    cost: what a case takes; cheap ones are preferred where there is a choice. Deterministic: of equally good
    cases the first.
    """
    pairs = _pairs([*cases, *chosen])                                # [cases + chosen, pairs of options]
    missing = np.zeros(pairs.max() + 1, dtype=bool)
    missing[pairs[:len(cases)]] = True
    missing[pairs[len(cases):]] = False
    pairs, costs = pairs[:len(cases)], np.array([cost(case) for case in cases])
    result = list(chosen)
    while missing.any():
        gained = missing[pairs].sum(1)
        best = int(np.argmax(np.where(gained == gained.max(), -costs, -np.inf)))
        result.append(cases[best])
        missing[pairs[best]] = False
    return result


def _pairs(cases: Sequence[Case]) -> np.ndarray:
    """The number of each pair of values, for each case and each pair of options."""
    columns = []
    for option in cases[0]:
        numbers: dict = {}
        columns.append(np.array([numbers.setdefault(case[option], len(numbers)) for case in cases]))
    found, end = [], 0
    for a, b in itertools.combinations(columns, 2):
        found.append(end + a * (b.max() + 1) + b)
        end += (a.max() + 1) * (b.max() + 1)
    return np.stack(found, axis=1)
