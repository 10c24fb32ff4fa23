"""Fields of requests that decide how tokens are chosen, common to completions and chat."""

import secrets
import sys
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...errors import ConfigError
from ..generation.requests import Sampling
from .refused_request import RefusedRequest
from .request_fields import RequestFields, integer, number

MOST_PARALLEL = 128  # texts of a request, as in OpenAI's API
MOST_TOKENS = 1 << 24  # in numbers of requests; models have fewer positions
MOST_STOPS = 16
SEEDS = 1 << 31
LEAST_PROBABILITY = sys.float_info.min
LONGEST_STOP = 256  # characters
# Clients send -1 for no limit of their own.
Count = Annotated[
    int | None, BeforeValidator(lambda value: None if value == -1 else value)
]
Integers = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class SamplingFields(RequestFields):
    """Fields of OpenAI's API come first, then further ones of vLLM."""

    model: str | None = None
    temperature: float = number(1.0, 0, 100)
    top_p: float = number(1.0, 0, 1)
    n: int = integer(1, 1, MOST_PARALLEL)
    seed: int | None = integer(None, -(1 << 63), (1 << 63) - 1)
    stop: str | Texts = Field("", description="a string or a list of strings")
    stream: bool = False
    stream_options: dict[str, Any] = {}
    top_k: int = integer(0, -1, MOST_TOKENS)
    min_p: float = number(0.0, 0, 1)
    repetition_penalty: float = number(1.0, 0.01, 100)
    min_tokens: int = integer(0, 0, MOST_TOKENS)
    stop_token_ids: Integers = Field(
        [], max_length=64, description="a list of up to 64 integers"
    )
    ignore_eos: bool = False

    def first_seed(self) -> int:
        """Return the seed of a request, or a random one. Numbers of any size become one that the generator takes."""
        return secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS

    def sampling(self, seed: int) -> Sampling:
        """Return how the tokens of a text are chosen. Raises RefusedRequest."""
        try:
            return Sampling(
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                # The smallest probability keeps only the likeliest token, which is what 0 means.
                top_p=max(self.top_p, LEAST_PROBABILITY),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                seed=seed % SEEDS,
            )
        except ConfigError as error:
            raise RefusedRequest(str(error)) from None

    def least(self, most: int) -> int:
        """Return how many tokens a continuation has at least. most: at most. Raises RefusedRequest."""
        if self.min_tokens > most:
            raise RefusedRequest(
                f"min_tokens is {self.min_tokens:,}, and the text has at most {most:,} new tokens. Lower it, or raise "
                "max_tokens.",
                "min_tokens",
            )
        return self.min_tokens

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end a continuation. An empty one ends nothing. Raises RefusedRequest for long and for
        many ones: each new token is compared with all their beginnings.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        longest = max(map(len, stops), default=0)
        if longest > LONGEST_STOP or len(stops) > MOST_STOPS:
            raise RefusedRequest(
                f"stop has {len(stops):,} texts of up to {longest:,} characters; at most {MOST_STOPS} texts of "
                f"{LONGEST_STOP} characters are compared.",
                "stop",
            )
        return tuple(filter(None, stops))

    def stop_tokens(self, usual: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a continuation."""
        return (frozenset() if self.ignore_eos else usual) | set(self.stop_token_ids)

    def wants_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens. Raises RefusedRequest."""
        options = self.stream_options
        if options and not self.stream:
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
