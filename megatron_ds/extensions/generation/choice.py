"""The next token of each text, from logits: all texts at once, each by its own `Sampling`.

Randomness is one number in [0, 1) for each token, a function of the seed and of the number of tokens that the
text has got so far. It is looked up in the cumulated probabilities, in fp64: so a text depends neither on the
layout nor on the texts beside it, unless their roundings move a probability across the number.

    logits [r, V] ── penalties for repetition ── forbidden tokens out ──┬── the largest: greedy
                                                                        └── / temperature, limits, draw

The penalties come first, as in transformers. Log-probabilities are of the logits themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...host.device_copies import on_device
from ...ops.keyed_random import Key, random_numbers, shift_right
from .requests import Sampling
from .token_limits import OUT, column, limited

BITS = 48  # of the random number
NO_TOKEN = -1  # where logits are no numbers, or all tokens are forbidden


@dataclass(frozen=True)
class Pick:
    """What is wanted of a row of logits.

    given      the token that follows, if only its log-probability is wanted; None: the next token is chosen
    step       number of tokens chosen before
    forbidden  tokens that are not chosen
    seen       different tokens of the text, for the repetition penalty; none where that is 1
    """

    sampling: Sampling
    step: int = 0
    given: int | None = None
    forbidden: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()
    alternatives: int | None = None

    @property
    def draws(self) -> bool:
        """Whether the token is drawn at random."""
        return self.given is None and self.sampling.temperature > 0


def choose(logits: Tensor, picks: Sequence[Pick], most: int) -> Tensor:
    """logits [r, V] → fp64 [r, 2 + 2n]: the token or NO_TOKEN, its log-probability, n likeliest tokens and their
    log-probabilities.

    most: n, of any pick. If no pick asks for them, log-probabilities are 0
    """
    logits = logits.float()
    tokens = _tokens(logits, picks).unsqueeze(1)
    # Without log-probabilities the token is all that is wanted.
    if all(pick.alternatives is None for pick in picks):
        nothing = tokens.new_zeros(len(picks), 1 + 2 * most)
        return torch.cat([tokens, nothing], dim=1).double()
    # Log-probabilities are those of the model, before temperature, limits and penalties.
    log_probs = logits.double().log_softmax(-1)
    likeliest = log_probs.topk(most)
    own = log_probs.gather(1, tokens.clamp(min=0))
    return torch.cat([tokens, own, likeliest.indices, likeliest.values], dim=1)


def _tokens(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """int64 [r], the tokens that are given, greedy or drawn; NO_TOKEN where none can be chosen."""
    device = logits.device
    scores = _without_forbidden(_penalized(logits, picks), picks)
    largest, tokens = scores.max(-1)
    tokens = tokens.masked_fill(~largest.isfinite(), NO_TOKEN)
    # Only rows that draw need random numbers.
    drawing = [row for row, pick in enumerate(picks) if pick.draws]
    if drawing:
        rows = on_device(torch.tensor(drawing), device)
        drawn = _drawn(scores[rows], [picks[row] for row in drawing])
        chosen = torch.where(tokens[rows] == NO_TOKEN, NO_TOKEN, drawn)
        tokens = tokens.index_copy(0, rows, chosen)
    # A token that is given counts whatever the model prefers.
    given = {}
    for row, pick in enumerate(picks):
        if pick.given is not None:
            given[row] = pick.given
    if given:
        rows, known = _columns([*given.items()], device)
        tokens = tokens.index_copy(0, rows, known)
    return tokens


def _penalized(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Return the logits after the penalties for repetition.

    Positive ones are divided and negative ones multiplied, so that a penalty above 1 lowers both.
    """
    places = []
    penalties = []
    for row, pick in enumerate(picks):
        places += [(row, token) for token in pick.seen]
        penalties += [pick.sampling.repetition_penalty] * len(pick.seen)
    if not places:
        return logits
    index = _columns(places, logits.device)
    penalty = column(penalties, logits.device).squeeze(1).float()
    found = logits[index]
    changed = torch.where(found > 0, found / penalty, found * penalty)
    return logits.index_put(index, changed)


def _without_forbidden(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Return the scores, -inf for the tokens that a row may not choose."""
    places = []
    for row, pick in enumerate(picks):
        places += [(row, token) for token in pick.forbidden]
    if not places:
        return scores
    out = scores.new_full((), OUT)
    return scores.index_put(_columns(places, scores.device), out)


def _columns(
    pairs: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, ...]:
    """Two int64 tensors on the device, of the first and of the second numbers."""
    table = torch.tensor(pairs).t().contiguous()
    return on_device(table, device).unbind()


def _drawn(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """scores [r, V] → int64 [r], drawn from what the limits of each row leave."""
    device = scores.device
    samplings = [pick.sampling for pick in picks]
    temperatures = [sampling.temperature for sampling in samplings]
    # Scores are differences from the largest one: its quotient with a small temperature may be infinite.
    scores = scores.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / column(temperatures, device)
    probabilities = limited(scores, samplings).softmax(-1)
    # The first token up to which the probabilities exceed the number.
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    keys = [(pick.sampling.seed, "token", pick.step) for pick in picks]
    wanted = uniform(keys, device) * total
    found = torch.searchsorted(cumulated, wanted, right=True)
    return found.squeeze(1)


def uniform(keys: Sequence[Key], device: torch.device) -> Tensor:
    """fp64 [r, 1], a number in [0, 1) of each key.

    It has fewer bits than fp64, so its product with a sum of probabilities is below the sum.
    """
    numbers = random_numbers(keys, 1, device)
    bits = shift_right(numbers, 64 - BITS)
    return bits.double() / (1 << BITS)
