"""The longest sequence that fits into the memory of a rank, found on plans.

A plan gives the peak of the worst rank for one length. Lengths are multiples of a unit that the layout can
divide. The peak is assumed to grow with the length; it is nearly a straight line, so a step of the bisection
goes to where the line between the ends of the interval meets the memory, and every third step to its middle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

from ...config import RunConfig
from ...errors import ConfigError
from ...features import features
from ...models.attention_layouts import attention_layouts
from .world_plan import plan_world, with_vocabulary

FIRST_TOKENS = 1024
MOST_TOKENS = 1 << 30
UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclass(frozen=True)
class Fit:
    """A length and its planned peak in bytes. beyond: the peak of the next length, which does not fit; None
    if it was not asked for."""

    length: int
    peak: int
    beyond: int | None


def longest(
    peak_of: Callable[[int], int],
    memory: int,
    unit: int = 1,
    most: int = MOST_TOKENS,
    least: int = 1,
) -> Fit | None:
    """Return the largest multiple of `unit` from `least` to `most` with peak_of(length) <= memory; None without one.

    peak_of: not decreasing; called about ten times
    """
    # Only multiples of the unit are tried.
    peak = cache(lambda count: peak_of(count * unit))
    first = -(-least // unit)
    below = first - 1
    last = max(first, most // unit)
    low = below
    high = min(max(first, FIRST_TOKENS // unit), last)
    # The length is doubled until it does not fit.
    while peak(high) <= memory:
        if high == last:
            return Fit(high * unit, peak(high), None)
        low = high
        high = min(2 * high, last)
    # A line through a peak that fits and one that does not gives the next guess, or the middle does.
    turn = 0
    while high - low > 1:
        turn += 1
        middle = (low + high) // 2
        if low > below and turn % 3 and peak(high) > peak(low):
            aim = low + (memory - peak(low)) * (high - low) // (peak(high) - peak(low))
            # The guess approaches the limit from both sides in turns.
            middle = min(max(aim + turn % 2, low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= memory else (low, middle)
    return Fit(low * unit, peak(low), peak(high)) if low > below else None


def length_unit(config: RunConfig, multiple_of: int = 1) -> int:
    """Return the smallest length that the layout and the blocks of attention can divide, a multiple of
    `multiple_of`. All others are multiples of it. `config` needs no length."""
    block = attention_layouts().block_length(config.model)
    return lcm(config.sequence_parts, block, multiple_of)


def length_range(config: RunConfig, unit: int) -> tuple[int, int]:
    """(the shortest, the longest) length that the other options allow, the first a multiple of `unit`.
    `config` needs no length."""
    model = config.model
    given = model.max_position_embeddings
    lengths = [
        1,
        *(f.least_length(config) for f in features() if f.least_length is not None),
        None if given else model.original_max_position_embeddings,
        attention_layouts().least_length(model),
    ]
    return -(
        -max(length or 0 for length in lengths) // unit
    ) * unit, given or MOST_TOKENS


def peak_by_plan(
    parse_length: Callable[[int], RunConfig], device: str
) -> Callable[[int], int]:
    """Return the function length → planned peak of the worst rank. parse_length: length → configuration."""

    def peak_of(length: int) -> int:
        config, _ = with_vocabulary(parse_length(length))
        return plan_world(config, 0, device).worst.peak

    return peak_of


def bytes_of(text: str) -> int:
    """Return a number of bytes such as 4GiB, 512MiB, 4GB (10⁹ bytes each) or 80e9. Raises ConfigError."""
    number = text.strip().rstrip("kKMGTiB").strip()
    unit = text.strip()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{text!r} is not a size. Write a number with KiB, MiB, GiB or TiB, such as 4GiB, "
            "or with kB, MB, GB or TB."
        ) from None


def without_length(flags: Sequence[str]) -> list[str]:
    """Return the flags of a run without the length of its sequences."""
    names = ("--seq-length", "--seq_length")
    kept = []
    skips = False
    for word in flags:
        if (
            not skips
            and not word.startswith(tuple(f"{name}=" for name in names))
            and word not in names
        ):
            kept.append(word)
        skips = word in names
    return kept
