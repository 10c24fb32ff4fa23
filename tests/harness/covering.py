"""Covering arrays: few cases in which every pair of option values still appears together.

Most faults of a composition need two options to meet. Greedy, as AETG does it (Cohen et al. 1997, IEEE TSE
23(7)): of some random cases take the one with the most pairs that no case had before. What options need of
each other are rules, so that cases are completed value by value, and no product of all options is made.
"""

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Case = Mapping[str, object]
Options = Mapping[str, Sequence]
Rule = Callable[..., bool]  # of some options' values, by the options' names
CANDIDATES = 2


def cover_pairs(
    options: Options,
    rules: Sequence[Rule] = (),
    cost: Callable[[Case], float] = lambda case: 0,
    chosen: Sequence[Case] = (),
    seed: int = 0,
) -> list[dict]:
    """`chosen` and more cases, which together hold every pair of values that any legal case holds.

    cost: what a case takes; cheap ones are preferred where there is a choice.
    """
    draw = random.Random(seed)
    search = Search(options, rules)
    missing = {item: set() for item in search.items}
    for (a, x), (b, y) in itertools.combinations(search.items, 2):
        if a != b:
            missing[a, x].add((b, y))
            missing[b, y].add((a, x))
    for case in chosen:
        _strike(missing, case)

    result = list(chosen)
    while any(missing.values()):
        item = max(search.items, key=lambda item: len(missing[item]))
        other = min(missing[item], key=search.items.index)
        found = [
            search.complete(dict([item, other]), missing, draw)
            for _ in range(CANDIDATES)
        ]
        if found[0] is None:  # no legal case has this pair
            missing[item].discard(other)
            missing[other].discard(item)
            continue
        result.append(max(found, key=lambda case: (_gain(missing, case), -cost(case))))
        _strike(missing, result[-1])
    return result


def with_each_value(
    cases: Sequence[Case], cost: Callable[[Case], float] = lambda case: 0
) -> list[Case]:
    """Return few of the cases, which together hold every value that any of them holds."""
    missing = {item for case in cases for item in case.items()}
    result = []
    while missing:
        best = max(
            cases, key=lambda case: (len(missing & {*case.items()}), -cost(case))
        )
        missing -= {*best.items()}
        result.append(best)
    return result


def plain_case(
    options: Options,
    rules: Sequence[Rule],
    given: Case,
    draw: random.Random | None = None,
) -> dict:
    """The legal case with the given values in which each other option has its first value, or the next that
    the rules allow. draw: of the order in which options are given values."""
    search = Search(options, rules)
    nothing = {item: set() for item in search.items}
    return search.complete(dict(given), nothing, draw or random.Random(0))


def random_case(options: Options, rules: Sequence[Rule], draw: random.Random) -> dict:
    """A legal case of values that are drawn."""
    shuffled = {name: draw.sample(xs, len(xs)) for name, xs in options.items()}
    return plain_case(shuffled, rules, {}, draw)


def is_legal(case: Case, rules: Sequence[Rule]) -> bool:
    """Whether all rules hold for the values of a case."""
    return all(
        rule(*(case[name] for name in inspect.signature(rule).parameters))
        for rule in rules
    )


def _gain(missing: Mapping, case: Case) -> int:
    items = set(case.items())
    return sum(len(missing[item] & items) for item in items)


def _strike(missing: Mapping, case: Case) -> None:
    items = set(case.items())
    for item in items & missing.keys():
        missing[item] -= items


class Search:
    """Legal cases with given values, found one option after the other."""

    def __init__(self, options: Options, rules: Sequence[Rule]):
        self.options = options
        self.items = [(name, x) for name, values in options.items() for x in values]
        # The options of each rule, and the values that it allows them together.
        self.allowed: list[tuple[tuple[str, ...], list[tuple]]] = []
        for rule in rules:
            names = tuple(inspect.signature(rule).parameters)
            product = itertools.product(*(options[name] for name in names))
            legal = [values for values in product if rule(*values)]
            self.allowed.append((names, legal))
        self.about = {
            name: [allowed for allowed in self.allowed if name in allowed[0]]
            for name in options
        }

    def complete(self, given: Case, missing: Mapping, draw: random.Random):
        """A legal case with the given values, in which many missing pairs are; None if there is none."""
        domains = {name: list(values) for name, values in self.options.items()}
        domains |= {name: [value] for name, value in given.items()}
        if not self._narrow(domains, self.options):
            return None
        # Options without a rule, which fail nowhere, are last.
        order = [name for name in self.options if name not in given]
        draw.shuffle(order)
        order.sort(key=lambda name: not self.about[name])
        return next(self._completions(dict(given), domains, order, missing), None)

    def _completions(self, given, domains, order, missing) -> Iterator[dict]:
        """Depth first; an option with one value left is next."""
        if not order:
            yield {name: given[name] for name in self.options}
            return
        name = next((name for name in order if len(domains[name]) == 1), order[0])
        rest = [other for other in order if other != name]
        items = given.items()
        gain = lambda value: sum(item in missing[name, value] for item in items)
        for value in sorted(domains[name], key=gain, reverse=True):
            left = domains | {name: [value]}
            if len(domains[name]) == 1 or self._narrow(left, [name]):
                there = given | {name: value}
                yield from self._completions(there, left, rest, missing)

    def _narrow(self, domains: dict[str, list], changed: Iterable[str]) -> bool:
        """Keep the values that each rule allows together with some values of its other options; False if an
        option is left without a value.

        changed: the options whose values have become fewer.
        """
        queue = list(changed)
        while queue:
            for names, legal in self.about[queue.pop()]:
                of_names = [domains[name] for name in names]
                columns = zip(
                    *(
                        values
                        for values in legal
                        if all(map(list.__contains__, of_names, values))
                    )
                )
                supported = [set(column) for column in columns]
                if not supported:
                    return False
                for name, values in zip(names, supported):
                    if len(values) < len(domains[name]):
                        domains[name] = [v for v in domains[name] if v in values]
                        queue.append(name)
        return True
