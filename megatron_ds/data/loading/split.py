"""Parts of a corpus for training, validation and test: contiguous ranges of its documents, cut as Megatron cuts them."""

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from ...errors import ConfigError

PARTS = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, ...]:
    """`"969, 30, 1"` → (0.969, 0.03, 0.001): one share for each of PARTS; what is left out is 0.

    Any proportions will do, also separated by "/". Raises ConfigError for other text.
    """
    try:
        numbers = [float(word) for word in re.split(r"[\s,/]+", text.strip(" ,/"))]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= len(PARTS) or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ConfigError(f"--split {text!r} is not a list of up to three proportions, none negative and not all zero: "
                          "write for example 969,30,1 or 98,2,0.")
    numbers += [0.0] * (len(PARTS) - len(numbers))
    return tuple(n / sum(numbers) for n in numbers)


def cut(num_documents: int, shares: Sequence[float]) -> tuple[range, ...]:
    """The documents of each part; bounds are running sums of the shares, rounded to a whole document (half to even)."""
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(range(first, last) for first, last in zip(bounds, bounds[1:]))
