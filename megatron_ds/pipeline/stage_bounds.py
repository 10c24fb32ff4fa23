"""Assignment of a list of layers to stages, by cost or by an explicit layout.

The result is a tuple of bounds: stage s holds layers bounds[s] to bounds[s + 1] - 1 of the model's list of
named layers.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, combinations

from ..errors import ConfigError, LayoutError

Bounds = tuple[int, ...]
MOST_REPEATS = 10_000  # of one "*n" in a layout


def partition(costs: Sequence[float], stages: int) -> Bounds:
    """Return the bounds that minimize the cost of the costliest stage; exact, with at least one layer on each stage.

    Raises LayoutError for more stages than layers, and for costs that are negative or not finite.

    Among several such cuts, the most even one (least sum of squares); among those, the one with the fewest
    layers on the early stages, which keep the most micro-batches alive.
    """
    n = len(costs)
    if not 1 <= stages <= n:
        raise LayoutError(
            f"{n} layers cannot be cut into {stages} pipeline stages: each stage holds at "
            f"least one layer. Use a pipeline size times chunks of 1 to {n}, or more layers."
        )
    bad = [c for c in costs if not 0 <= c < math.inf]
    if bad:
        raise LayoutError(
            f"a layer has cost {bad[0]}. Costs are summed and compared: use finite numbers "
            "from 0 up."
        )
    return _cut_evenly(tuple(costs), stages)


@lru_cache(maxsize=1000)  # a search cuts the same model again and again
def _cut_evenly(costs: tuple[float, ...], stages: int) -> Bounds:
    # prefix[i] is the cost of the first i layers.
    prefix = [0, *accumulate(_as_integers(costs))]
    limit = _least_maximum(prefix, stages)
    return _most_even(prefix, stages, limit)


def parse_layout(text: str, is_block: Sequence[bool], stages: int) -> Bounds:
    """Bounds of an explicit layout.

    is_block  of each layer of the model in order: True for a decoder layer, False for those before the blocks
              (embedding) and behind them (final norm, head)
    text    either decoder layers per stage, "3,2,3": layers before the blocks go to the first stage, those
            behind to the last. Or one letter a layer and "|" between stages, "Et*3|(tt|)*2t*3L": E embedding,
            t decoder layer, L norm and head, m before it a further depth of the head; "*n" repeats, parentheses
            group, commas and blanks are ignored; E and L may be omitted.
    """
    # Numbers of layers before and behind the decoder layers.
    blocks = [at for at, block in enumerate(is_block) if block]
    before = len(is_block)
    behind = 0
    if blocks:
        before = blocks[0]
        behind = len(is_block) - blocks[-1] - 1
    wrong = lambda what: _wrong(text, what, len(blocks), stages)
    # As many stages and decoder layers as there are.
    is_counts = _is_counts(text)
    if is_counts:
        parts = text.split(",")
        named = sum(map(int, parts))
    else:
        letters = written_out(text)
        parts = letters.split("|")
        named = letters.count("t")
    if len(parts) != stages:
        raise wrong(f"it has {len(parts)} stages, but the pipeline has {stages}")
    if named != len(blocks):
        raise wrong(f"it has {named} decoder layers, but the model has {len(blocks)}")
    # One string of E, t, m and L for each stage; E and L are added where they were omitted.
    if is_counts:
        parts = ["t" * int(count) for count in parts]
    given = "".join(parts)
    if "E" not in given:
        parts[0] = "E" + parts[0]
    if "L" not in given:
        parts[-1] += "L"
    expected = "E" + "t" * len(blocks) + "L"
    if re.sub("m*L", "L", "".join(parts)) != expected:
        raise wrong(
            "E comes once, before the decoder layers, and L once, after them and the depths m"
        )
    # Count the layers of each stage.
    size = {"E": before, "t": 1, "m": 0, "L": behind}
    counts = [sum(size[letter] for letter in part) for part in parts]
    if 0 in counts:
        raise wrong(f"stage {counts.index(0)} would hold no layer")
    return (0, *accumulate(counts))


def count_stages(text: str) -> int:
    """Number of stages of a layout. Raises ConfigError for another form."""
    if _is_counts(text):
        return 1 + text.count(",")
    return 1 + written_out(text).count("|")


def _is_counts(text: str) -> bool:
    """Return whether a layout has the form "3,2,3"."""
    return bool(re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text))


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Return the costs as multiples of one unit, so that sums are exact and equal cuts compare as equal."""
    ratios = [c.as_integer_ratio() for c in costs]
    denominators = [denominator for _, denominator in ratios]
    unit = math.lcm(*denominators)
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _least_maximum(prefix: Sequence[int], stages: int) -> int:
    """Bisection over the costs of all runs of layers, one of which is the optimum."""
    runs = combinations(prefix, 2)
    candidates = sorted({end - start for start, end in runs})
    # Costs below the optimum do not fit; all from it on do.
    fits = lambda limit: _fits(prefix, stages, limit)
    least = bisect_left(candidates, True, key=fits)
    return candidates[least]


def _fits(prefix: Sequence[int], stages: int, limit: int) -> bool:
    """Return whether `stages` stages of at most `limit` suffice. Fewer do too: dividing a stage raises no cost."""
    used = 1
    start = 0
    for at in range(1, len(prefix)):
        # Layer at - 1, alone and as the last of the stage that began at `start`.
        own_cost = prefix[at] - prefix[at - 1]
        stage_cost = prefix[at] - prefix[start]
        if own_cost > limit:
            return False
        if stage_cost > limit:
            used = used + 1
            start = at - 1
    return used <= stages


def _most_even(prefix: Sequence[int], stages: int, limit: int) -> Bounds:
    """Dynamic programming from the back: least[i] = (sum of squares, end of the first stage) of i..n."""
    n = len(prefix) - 1
    none = (math.inf, n)
    # No stage holds no layer; more stages are added in front of those that are known.
    least: list[tuple[float, int]] = [none] * n + [(0, n)]
    ends = []
    for _ in range(stages):
        following = least
        least = [none] * (n + 1)
        for i in range(n):
            # The first stage holds layers i to j - 1, as long as its cost is within the limit.
            for j in range(i + 1, n + 1):
                cost = prefix[j] - prefix[i]
                if cost > limit:
                    break
                rest, _ = following[j]
                squares = cost * cost + rest
                least[i] = min(least[i], (squares, j))
        ends.append([end for _, end in least])
    # Forward again: the end of each stage is the start of the next.
    bounds = [0]
    for end_from in reversed(ends):
        start = bounds[-1]
        bounds.append(end_from[start])
    return tuple(bounds)


def written_out(text: str) -> str:
    """Return a layout of letters without repetitions and parentheses. Raises ConfigError for other letters."""
    expanded = re.sub(r"[\s,]", "", text)
    repeated = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])\*(\d+)")
    while found := repeated.search(expanded):
        # The innermost group, or a single letter with a number.
        group, group_times, letter, letter_times = found.groups()
        times = int(group_times or letter_times or 1)
        if times > MOST_REPEATS or len(expanded) > MOST_REPEATS:
            raise ConfigError(
                f"pipeline layout {text!r} repeats a part {times} times: no model has that "
                f"many layers. Use at most {MOST_REPEATS}."
            )
        before = expanded[: found.start()]
        behind = expanded[found.end() :]
        repeated_part = (letter or group) * times
        expanded = before + repeated_part + behind
    strange = re.search(r"[^EtmL|]", expanded)
    if strange:
        raise ConfigError(
            f"pipeline layout {text!r} contains {strange.group()!r}, which is not valid at "
            "that position. Valid: decoder layers per stage, such as 3,2,3; or E (embedding), "
            "t (decoder layer), m (depth of --mtp-num-layers), L (norm and head), | between stages, *n to repeat, "
            "parentheses, such as Et*3|t*2|t*3L."
        )
    return expanded


def _wrong(text: str, what: str, num_blocks: int, stages: int) -> ConfigError:
    """Return the error for a layout, with an even layout in both forms as examples."""
    each, more = divmod(num_blocks, stages)
    fewer = stages - more
    even = [each] * fewer + [each + 1] * more
    counts = ",".join(map(str, even))
    letters = "|".join(f"t*{n}" if n else "" for n in even)
    return ConfigError(
        f"pipeline layout {text!r}: {what}. Each of the {stages} stages holds at least one of "
        f"the model's layers, in their order; for example {counts} or "
        f"E{letters}L."
    )
