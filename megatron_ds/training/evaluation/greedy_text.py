"""Greedy continuations by scores alone, so under any layout: each step scores one token behind every text.

Each token costs a forward over the whole text, as there is no cache of keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.tokenizers import Tokenizer
from .leading_rank import Score
from .score_plan import ScoreRequest


@dataclass(frozen=True)
class Prompt:
    """tokens: what is continued; until: texts at whose first occurrence the continuation ends, without it."""

    tokens: tuple[int, ...]
    until: tuple[str, ...]
    max_new_tokens: int


def continue_greedily(
    score: Score, tokenizer: Tokenizer, prompts: Sequence[Prompt], max_length: int
) -> list[str]:
    """The continuation of each prompt, which ends also at the end of a document, and after `max_length` tokens
    in all. Calls `score` once for each token of the longest continuation."""
    texts = [list(prompt.tokens) for prompt in prompts]
    alive = list(range(len(prompts)))
    while alive:
        # The score of any token comes with the likeliest one at its place.
        found = score([ScoreRequest((*texts[i], 0), 1) for i in alive])
        for i, scored in zip(alive, found, strict=True):
            texts[i].append(int(scored.likeliest[0]))
        alive = [
            i
            for i in alive
            if len(texts[i]) <= max_length
            and not _is_complete(tokenizer, prompts[i], texts[i])
        ]
    pairs = zip(prompts, texts, strict=True)
    return [_text(tokenizer, prompt, _new(prompt, ids)) for prompt, ids in pairs]


def _new(prompt: Prompt, text: Sequence[int]) -> Sequence[int]:
    return text[len(prompt.tokens) :]


def _is_complete(tokenizer: Tokenizer, prompt: Prompt, text: Sequence[int]) -> bool:
    new = _new(prompt, text)
    if new[-1] == tokenizer.eod or len(new) >= prompt.max_new_tokens:
        return True
    decoded = tokenizer.decode(new)
    return any(end in decoded for end in prompt.until)


def _text(tokenizer: Tokenizer, prompt: Prompt, new: Sequence[int]) -> str:
    """The text up to the first end."""
    if new and new[-1] == tokenizer.eod:
        new = new[:-1]
    text = tokenizer.decode(new)
    for end in prompt.until:
        text = text.split(end)[0]
    return text
