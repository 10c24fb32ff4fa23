"""Limits of sampling: which tokens may be drawn, for many rows of scores at once, each row by its own numbers.

    top_k   the k largest scores, and all that equal the smallest of them
    top_p   the likeliest tokens up to the one with which they hold the probability p
    min_p   the tokens with at least this share of the largest probability

A limit takes scores [r, V], fp64 and divided by the temperature, and returns them with -inf for the tokens that it
leaves out. The order is that of transformers: later limits see the probabilities that earlier ones left. Nothing
waits for the device: what decides the work of the host are the numbers of the requests.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...host.device_copies import on_device
from .requests import Sampling

OUT = -torch.inf


def column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """fp64 [r, 1], one number for each row."""
    made = torch.tensor(numbers, dtype=torch.float64)
    return on_device(made, device).unsqueeze(1)


def limited(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the scores within the limits of all rows. A limit that no row has costs nothing."""
    for name, limit in LIMITS.items():
        numbers = [getattr(sampling, name) for sampling in samplings]
        if any(number != limit.none for number in numbers):
            scores = limit.apply(scores, numbers)
    return scores


def limit_top_k(scores: Tensor, numbers: Sequence[float]) -> Tensor:
    """Keep the k largest scores of each row; k = 0: all."""
    most = min(int(max(numbers)), scores.shape[1])
    best = scores.topk(most).values
    # Scores below the k-th one are left out.
    k = column(numbers, scores.device).long()
    last = (k - 1).clamp(0, most - 1)
    least = best.gather(1, last)
    is_out = (scores < least) & (k > 0)
    return scores.masked_fill(is_out, OUT)


def limit_top_p(scores: Tensor, numbers: Sequence[float]) -> Tensor:
    """Keep the likeliest tokens of each row, which hold the probability p together; p = 1: all."""
    p = column(numbers, scores.device)
    probabilities = scores.softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    # The probability that the likelier tokens hold together.
    before = ordered.cumsum(-1) - ordered
    is_late = (before >= p) & (p < 1)
    # The order is still that of the probabilities, and has to be that of the vocabulary.
    is_out = is_late.scatter(1, order, is_late)
    return scores.masked_fill(is_out, OUT)


def limit_min_p(scores: Tensor, numbers: Sequence[float]) -> Tensor:
    """Keep the tokens of each row with this share of its largest probability; 0: all."""
    share = column(numbers, scores.device)
    largest = scores.amax(-1, keepdim=True)
    least = largest + share.log()
    return scores.masked_fill(scores < least, OUT)


class _Limit(NamedTuple):
    """A limit, and the number that limits nothing."""

    none: float
    apply: Callable[[Tensor, Sequence[float]], Tensor]


# Limits by the names of the fields of `Sampling`, in the order in which they apply.
LIMITS = {
    "top_k": _Limit(0, limit_top_k),
    "top_p": _Limit(1, limit_top_p),
    "min_p": _Limit(0, limit_min_p),
}
