"""`TokenEntry`: a token as answers show it, with its log-probability and those of others in its place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.tokenizers import Tokenizer

Alternatives = Sequence[tuple[int, float]]
LEAST_LOG_PROB = (
    -9999.0
)  # JSON has no infinity and no NaN; OpenAI's number for an impossible token


@dataclass(frozen=True)
class TokenEntry:
    """text: what the token adds to the text before it.

    log_prob      None of a first token, which nothing comes before
    alternatives  (text, log-probability) of the likeliest tokens and of this one, the likeliest first; None
                  without log_prob
    """

    text: str
    log_prob: float | None
    alternatives: tuple[tuple[str, float], ...] | None


def entry_of(
    words: Tokenizer,
    text: str,
    token: int,
    log_prob: float | None,
    alternatives: Alternatives,
) -> TokenEntry:
    """Return the entry of a token whose text is `text`."""
    if log_prob is None:
        return TokenEntry(text, None, None)
    own = _finite(log_prob)
    shown = [(words.decode([i]), _finite(other)) for i, other in alternatives]
    if all(i != token for i, _ in alternatives):
        shown.append((text, own))
    return TokenEntry(text, own, tuple(shown))


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > LEAST_LOG_PROB else LEAST_LOG_PROB


def completion_log_probs(
    entries: Sequence[TokenEntry], offset: int
) -> dict[str, list[Any]]:
    """`logprobs` of /v1/completions. offset: of the first token, in characters."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.log_prob for entry in entries],
        "top_logprobs": [_by_text(entry.alternatives) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(alternatives: Iterable[tuple[str, float]] | None) -> dict | None:
    """Return {text: log-probability}. Of tokens with the same text the likeliest counts."""
    if alternatives is None:
        return None
    found: dict[str, float] = {}
    for text, log_prob in alternatives:
        found.setdefault(text, log_prob)
    return found


def chat_log_probs(entries: Sequence[TokenEntry], most: int) -> dict[str, list]:
    """`logprobs` of /v1/chat/completions. most: alternatives of each token."""
    return {
        "content": [
            {
                **_chat_token(entry.text, entry.log_prob),
                "top_logprobs": [
                    _chat_token(*other) for other in (entry.alternatives or ())[:most]
                ],
            }
            for entry in entries
        ]
    }


def _chat_token(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode("utf-8"))}
