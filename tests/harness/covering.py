"""Covering arrays: few cases in which every pair of option values still appears together.

Most faults of a composition need two options to meet. Greedy, as AETG does it (Cohen et al. 1997, IEEE TSE
23(7)): take the case with the most pairs that no case had before. A grid has half a million cases and is
searched wherever its tests are collected: cases are rows of numbers until they are chosen.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

Case = Mapping[str, object]


@dataclass(frozen=True)
class Cases(Sequence):
    """Cases of some options; as a sequence, a dict for each.

    options: the values of each option.
    numbers: [options, cases], the position of each case's value among those of its option.
    judged: the options on which legality and cost depend.
    """

    options: Mapping[str, Sequence]
    numbers: np.ndarray
    judged: tuple[str, ...]

    def __len__(self) -> int:
        return self.numbers.shape[1]

    def __getitem__(self, i: int) -> dict:
        return {
            option: values[n]
            for (option, values), n in zip(self.options.items(), self.numbers[:, i])
        }

    def __iter__(self) -> Iterator[dict]:
        return (self[i] for i in range(len(self)))

    def where(self, option: str, value: object) -> "Cases":
        """The cases whose option has that value."""
        held = self.column(option) == self.options[option].index(value)
        return replace(self, numbers=self.numbers[:, held])

    def column(self, option: str) -> np.ndarray:
        """The numbers of an option's values, one for each case."""
        return self.numbers[[*self.options].index(option)]

    def pairs(self, a: str, b: str) -> set[tuple]:
        """The pairs of values that two options have together in any case."""
        width = len(self.options[b])
        found = np.unique(self.column(a) * width + self.column(b))
        return {
            (self.options[a][pair // width], self.options[b][pair % width])
            for pair in found
        }

    def costs(self, cost: Callable[[Case], float]) -> np.ndarray:
        """The cost of each case, asked once for each combination of the judged options."""
        sizes = [len(self.options[option]) for option in self.judged]
        columns = tuple(self.column(option) for option in self.judged)
        _, firsts, kinds = np.unique(
            np.ravel_multi_index(columns, sizes), return_index=True, return_inverse=True
        )
        return np.array([cost(self[i]) for i in firsts])[kinds]


def legal_cases(
    options: Mapping[str, Sequence],
    is_legal: Callable[[Case], bool] = lambda case: True,
    judged: Sequence[str] = (),
) -> Cases:
    """The product of all options' values, without the illegal combinations.

    judged: the options on which legality and cost depend, all of them unless given. `is_legal` is asked once
    for each combination of their values, and shown nothing else.
    """
    judged = tuple(option for option in options if option in judged) or tuple(options)
    legal = [
        is_legal(dict(zip(judged, values)))
        for values in itertools.product(*(options[option] for option in judged))
    ]
    ones = [
        len(values) if option in judged else 1 for option, values in options.items()
    ]
    whole = np.broadcast_to(
        np.reshape(legal, ones), [len(values) for values in options.values()]
    )
    return Cases(options, np.stack(np.nonzero(whole)).astype(np.int16), judged)


def cover_pairs(
    cases: Cases,
    cost: Callable[[Case], float] = lambda case: 0,
    chosen: Sequence[Case] = (),
) -> list[Case]:
    """`chosen` and some of `cases` that together hold every pair of values that any of `cases` holds.

    cost: what a case takes; cheap ones are preferred where there is a choice. Deterministic: of equally good
    cases the first.
    """
    costs = cases.costs(cost)
    missing = {
        (a, b): _numbered_pairs(cases, a, b)
        for a, b in itertools.combinations(cases.options, 2)
    }
    gained = np.full(len(cases), len(missing), dtype=np.int16)
    result = list(chosen)

    def strike(case: Case) -> None:
        for (a, b), (numbers, pairs) in missing.items():
            pair = cases.options[a].index(case[a]) * len(
                cases.options[b]
            ) + cases.options[b].index(case[b])
            if pair in pairs:
                pairs.remove(pair)
                np.subtract(gained, 1, out=gained, where=numbers == pair)

    for case in chosen:
        strike(case)
    while (most := gained.max()) > 0:
        result.append(cases[int(np.argmin(np.where(gained == most, costs, np.inf)))])
        strike(result[-1])
    return result


def _numbered_pairs(cases: Cases, a: str, b: str) -> tuple[np.ndarray, set[int]]:
    """The number of each case's pair of values of two options, and the numbers that there are."""
    numbers = cases.column(a) * np.int16(len(cases.options[b])) + cases.column(b)
    return numbers, set(np.flatnonzero(np.bincount(numbers)).tolist())
