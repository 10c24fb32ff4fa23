"""Megatron's zero-shot tasks: the perplexity of a long text, and the last words of passages.

WIKITEXT103   one text, read in windows that overlap: each token is predicted once, from at least
              seq_length - stride tokens before it (in the first window, from fewer)
LAMBADA       JSON lines with "text": is the last word the likeliest one? (Paperno et al. 2016,
              arXiv:1606.06031)
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...data.tokenizers import Tokenizer
from ...errors import ConfigError, DataError
from ...host.regular_file import read_regular
from ..generation.model_text import plain_ids, text_ids
from .detokenizers import DETOKENIZERS, Detokenizer
from .leading_rank import Score
from .score_plan import ScoreRequest

# A larger mean of losses counts as this one in a perplexity, as in Megatron.
MOST = 20.0
AT_ONCE = 4096  # requests of a call, which bounds the memory of their tokens


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts one text.

    loss        mean negative log-probability of a token, natural logarithm
    perplexity  exp(loss)
    token_ratio          tokens of the tokenizer for each word of the file
    adjusted_perplexity  exp(loss * token_ratio): of a word of the file, whatever the tokenizer is
    """

    loss: float
    perplexity: float
    token_ratio: float
    adjusted_perplexity: float
    tokens: int
    words: int


@dataclass(frozen=True)
class LastWords:
    """How many passages end as the model would end them. shortened: passages that lost their beginning, to fit."""

    correct: int
    passages: int
    accuracy: float
    shortened: int


def perplexity(total: float, tokens: int, words: int) -> Perplexity:
    """total: sum of the negative log-probabilities of all tokens but the first; tokens, words: of the text."""
    loss = total / (tokens - 1)
    ratio = (tokens - 1) / max(1, words - 1)
    return Perplexity(
        loss,
        math.exp(min(MOST, loss)),
        ratio,
        math.exp(min(MOST, loss * ratio)),
        tokens,
        words,
    )


def windows(tokens: Sequence[int], length: int, stride: int) -> list[ScoreRequest]:
    """Cut a long text into requests that read at most `length` tokens, each `stride` tokens further on.

    The first one scores all that it predicts, others their last `stride` tokens, and the last one the rest.
    """
    found = []
    done = 0
    for first in range(0, len(tokens) - 1, stride):
        if done >= len(tokens) - 1:
            break
        window = tuple(tokens[first : first + length + 1])
        end = first + len(window) - 1
        found.append(ScoreRequest(window, end - done))
        done = end
    return found


def wikitext103(
    score: Score,
    tokenizer: Tokenizer,
    path: Path,
    *,
    length: int,
    stride: int,
    detokenizer: str = "wikitext",
) -> dict:
    """Return the `Perplexity` of a text file, by name. Raises ConfigError, and DataError for a file without text."""
    if not 1 <= stride <= length:
        raise ConfigError(
            f"--overlapping-eval {stride} with --seq-length {length}: windows further apart than they are long "
            f"would leave out tokens. Use 1 to {length}."
        )
    text = _read(path)
    ids = text_ids(tokenizer, DETOKENIZERS[detokenizer](text))
    if len(ids) < 2:
        raise DataError(f"--valid-data {path} has {len(ids)} tokens; scoring needs 2.")
    requests = windows(ids, length, stride)
    total = 0.0
    for first in range(0, len(requests), AT_ONCE):
        found = score(requests[first : first + AT_ONCE])
        total -= math.fsum(scored.total for scored in found)
    return asdict(perplexity(total, len(ids), len(text.strip().split(" "))))


def lambada(
    score: Score,
    tokenizer: Tokenizer,
    path: Path,
    *,
    length: int,
    strict: bool,
    detokenizer: str = "none",
) -> dict:
    """Return the `LastWords` of a file of JSON lines, by name. Raises DataError for a line that has no text.

    strict: the target is the last word, with a blank before it; otherwise the last token of the text
    """
    # Passages that are too long lose their beginning.
    requests = _passages(tokenizer, path, strict, DETOKENIZERS[detokenizer])
    shortened = sum(request.inputs > length for request in requests)
    cut = [ScoreRequest(r.tokens[-length - 1 :], r.scored) for r in requests]
    correct = 0
    for first in range(0, len(cut), AT_ONCE):
        found = score(cut[first : first + AT_ONCE])
        correct += sum(scored.is_greedy for scored in found)
    share = correct / len(cut)
    return asdict(LastWords(correct, len(cut), share, shortened))


def _passages(
    tokenizer: Tokenizer, path: Path, strict: bool, detokenize: Detokenizer
) -> list[ScoreRequest]:
    """Return the passages of a file, whose targets are scored."""
    requests = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        text = detokenize(_text_of(line, f"{path}:{number}"))
        context, target = last_word(tokenizer, text, strict)
        if not context or not target:
            raise DataError(
                f"{path}:{number}: a passage of one word has nothing before its last one. Remove the line."
            )
        requests.append(ScoreRequest((*context, *target), len(target)))
    if not requests:
        raise DataError(f"--valid-data {path} has no passages.")
    return requests


def last_word(
    tokenizer: Tokenizer, text: str, strict: bool
) -> tuple[list[int], list[int]]:
    """(ids before the target, ids of the target); no ids of a text with nothing before its target"""
    if not strict:
        ids = text_ids(tokenizer, text)
        is_one = len(plain_ids(tokenizer, text)) < 2
        return ([], []) if is_one else ([*ids[:-1]], [*ids[-1:]])
    words = text.split()
    if len(words) < 2:
        return [], []
    before = text[: text.rfind(words[-1])].strip()
    # Some tokenizers put tokens in front of a text, which the target must not have.
    return [*text_ids(tokenizer, before)], plain_ids(tokenizer, f" {words[-1]}")


def _text_of(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        if not isinstance(text, str):
            raise TypeError(f"the text is {type(text).__name__}")
        text.encode()  # half a surrogate pair is JSON, and no character
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f'{place}: cannot read {{"text": …}} from this line ({error!r}). LAMBADA is one JSON object a line.'
        ) from None
    return text


def _read(path: Path) -> str:
    try:
        content = read_regular(path, DataError, name=f"--valid-data {path}")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {path} cannot be read: {error}.") from None
