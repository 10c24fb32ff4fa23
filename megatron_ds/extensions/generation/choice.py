"""The next token of each text, from logits: all texts at once, each by its own `Sampling`.

Randomness is one number in [0, 1) for each token, a function of the seed and of the number of tokens that the
text has got so far. It is looked up in the cumulated probabilities, in fp64: so a text depends neither on the
layout nor on the texts beside it, unless their roundings move a probability across the number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...host.device_copies import on_device
from ...ops.keyed_random import Key, random_numbers, shift_right
from .requests import Sampling

BITS = 48  # of the random number


@dataclass(frozen=True)
class Pick:
    """What is wanted of a row of logits.

    given      the token that follows, whose log-probability is wanted; None: the next token is chosen
    step       number of tokens chosen before
    forbidden  tokens that are not chosen
    seen       tokens of the text, for the repetition penalty
    """

    sampling: Sampling
    step: int = 0
    given: int | None = None
    forbidden: frozenset[int] = frozenset()
    seen: Sequence[int] = ()
    alternatives: int | None = None


def choose(logits: Tensor, picks: Sequence[Pick], most: int) -> Tensor:
    """logits [r, V] → fp64 [r, 2 + 2n]: the token, its log-probability, n likeliest tokens and their
    log-probabilities.

    most: n, of any pick. If no pick asks for them, log-probabilities are 0
    """
    logits = logits.float()
    tokens = _tokens(logits, picks)[:, None]
    if all(pick.alternatives is None for pick in picks):
        return torch.cat([tokens, tokens.new_zeros(len(picks), 1 + 2 * most)], 1).double()
    # Of the model's own distribution.
    log_probs = logits.double().log_softmax(-1)
    likeliest = log_probs.topk(most)
    own = log_probs.gather(1, tokens)
    return torch.cat([tokens, own, likeliest.indices, likeliest.values], dim=1)


def _tokens(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """int64 [r], the tokens that are given, greedy or drawn."""
    scores = _penalized(logits, picks)
    tokens = scores.argmax(-1)
    drawn = [
        row
        for row, pick in enumerate(picks)
        if pick.given is None and pick.sampling.temperature > 0
    ]
    if drawn:
        rows = on_device(torch.tensor(drawn), logits.device)
        tokens[rows] = _drawn(scores[rows], [picks[row] for row in drawn])
    given = [pick.given for pick in picks]
    if any(token is not None for token in given):
        known = torch.tensor([-1 if token is None else token for token in given])
        known = on_device(known, logits.device)
        tokens = torch.where(known < 0, tokens, known)
    return tokens


def _penalized(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """The logits after penalties, and -inf where a token is forbidden."""
    repeating = [
        (row, token, pick.sampling.repetition_penalty)
        for row, pick in enumerate(picks)
        if pick.given is None and pick.sampling.repetition_penalty != 1
        for token in set(pick.seen)
    ]
    forbidden = [
        (row, token) for row, pick in enumerate(picks) for token in pick.forbidden
    ]
    if not repeating and not forbidden:
        return logits
    scores = logits.clone()
    if repeating:
        rows, tokens, penalties = _columns(repeating, logits.device)
        place = rows.long(), tokens.long()
        found = scores[place]
        penalties = penalties.to(found.dtype)
        scores[place] = torch.where(found > 0, found / penalties, found * penalties)
    if forbidden:
        rows, tokens = _columns(forbidden, logits.device)
        scores[rows.long(), tokens.long()] = -torch.inf
    return scores


def _columns(table: Sequence[tuple[float, ...]], device: torch.device) -> Tensor:
    """fp64 [columns, rows] of a table."""
    return on_device(torch.tensor(table, dtype=torch.float64).t().contiguous(), device)


def _drawn(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """scores [r, V] → int64 [r], drawn from what the limits of each row leave."""
    samplings = [pick.sampling for pick in picks]
    column = lambda name: _columns([(getattr(s, name),) for s in samplings], scores.device)[0][:, None]
    scores = scores.double() / column("temperature")
    # Limits, each where a row has one.
    most = max(sampling.top_k for sampling in samplings)
    if most:
        best = scores.topk(min(most, scores.shape[1])).values
        top_k = column("top_k").long()
        least = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1))
        scores = scores.masked_fill((scores < least) & (top_k > 0), -torch.inf)
    if any(sampling.top_p < 1 for sampling in samplings):
        top_p = column("top_p")
        ordered, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier tokens hold already
        out = (before >= top_p) & (top_p < 1)
        scores = scores.masked_fill(out.scatter(1, order, out), -torch.inf)
    probabilities = scores.softmax(-1)
    if any(sampling.min_p > 0 for sampling in samplings):
        least = column("min_p") * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    # The first token up to which the probabilities exceed the number.
    cumulated = probabilities.cumsum(-1)
    numbers = uniform([(p.sampling.seed, "token", p.step) for p in picks], scores.device)
    found = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    return found[:, 0]


def uniform(keys: Sequence[Key], device: torch.device) -> Tensor:
    """fp64 [r, 1], a number in [0, 1) of each key."""
    bits = shift_right(random_numbers(keys, 1, device), 64 - BITS)
    return bits.double() / (1 << BITS)
