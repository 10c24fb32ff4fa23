"""Fields of requests that decide how tokens are chosen, common to completions and chat."""

import secrets
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..generation.requests import Sampling
from .accepted_fields import OF_CLIENTS
from .refused_request import RefusedRequest
from .request_fields import RequestField

MOST_PARALLEL = 128  # texts of a request, as in OpenAI's API
MOST_TOKENS = 1 << 24  # in numbers of requests; models have fewer positions
SEEDS = 1 << 31
LEAST_PROBABILITY = sys.float_info.min
LONGEST_STOP = 256  # characters
PENALTY = "Use repetition_penalty, which divides or multiplies the logits of tokens that occurred."

# Fields of OpenAI's API come first, then further ones of vLLM.
SAMPLING: dict[str, RequestField] = {
    "temperature": RequestField("number", 1.0, 0, 100),
    "top_p": RequestField("number", 1.0, 0, 1),
    "n": RequestField("integer", 1, 1, MOST_PARALLEL),
    "seed": RequestField("integer", None, -(1 << 63), (1 << 63) - 1),
    "stop": RequestField("texts", (), 0, 16),
    "stream": RequestField("boolean", False),
    "stream_options": RequestField("object"),
    "presence_penalty": RequestField("number", 0, only=(0,), reason=PENALTY),
    "frequency_penalty": RequestField("number", 0, only=(0,), reason=PENALTY),
    "logit_bias": RequestField("object", {}, only=({},), reason="Leave it out."),
    "top_k": RequestField("integer", 0, -1, MOST_TOKENS),
    "min_p": RequestField("number", 0.0, 0, 1),
    "repetition_penalty": RequestField("number", 1.0, 0.01, 100),
    "min_tokens": RequestField("integer", 0, 0, MOST_TOKENS),
    "stop_token_ids": RequestField("integers", (), 0, 64),
    "ignore_eos": RequestField("boolean", False),
    **OF_CLIENTS,
}


def seed_of(values: Mapping[str, Any]) -> int:
    """Return the seed of a request, or a random one. Numbers of any size become one that the generator takes."""
    given = values["seed"]
    return secrets.randbelow(SEEDS) if given is None else given % SEEDS


def sampling_of(values: Mapping[str, Any], seed: int) -> Sampling:
    """Return how the tokens of a text are chosen. Raises RefusedRequest."""
    try:
        return Sampling(
            temperature=float(values["temperature"]),
            top_k=max(values["top_k"], 0),
            # The smallest probability keeps only the likeliest token, which is what 0 means.
            top_p=max(float(values["top_p"]), LEAST_PROBABILITY),
            min_p=float(values["min_p"]),
            repetition_penalty=float(values["repetition_penalty"]),
            seed=seed % SEEDS,
        )
    except ConfigError as error:
        raise RefusedRequest(str(error)) from None


def least_of(values: Mapping[str, Any], most: int) -> int:
    """Return how many tokens a continuation has at least. most: at most. Raises RefusedRequest."""
    least = values["min_tokens"]
    if least > most:
        raise RefusedRequest(
            f"min_tokens is {least:,}, and the text has at most {most:,} new tokens. Lower it, or raise max_tokens.",
            "min_tokens",
        )
    return least


def stops_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that end a continuation. An empty one ends nothing. Raises RefusedRequest for long ones: each
    new token is compared with all their beginnings."""
    stop = values["stop"]
    stops = [stop] if isinstance(stop, str) else stop
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        raise RefusedRequest(
            f"stop has a text of {longest:,} characters; at most {LONGEST_STOP} are compared.",
            "stop",
        )
    return tuple(filter(None, stops))


def stop_tokens_of(values: Mapping[str, Any], usual: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a continuation."""
    return (frozenset() if values["ignore_eos"] else usual) | set(
        values["stop_token_ids"]
    )


def wants_usage(values: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with the numbers of tokens. Raises RefusedRequest."""
    options = values["stream_options"] or {}
    if not options:
        return False
    if not values["stream"]:
        raise RefusedRequest(
            "stream_options without stream: true has no effect. Remove it.",
            "stream_options",
        )
    for name, value in options.items():
        known = name in ("include_usage", "include_obfuscation")
        if not known or not isinstance(value, bool):
            raise RefusedRequest(
                f"stream_options has {name[:60]!r}; it takes include_usage, true or false.",
                "stream_options",
            )
    return options.get("include_usage", False)
