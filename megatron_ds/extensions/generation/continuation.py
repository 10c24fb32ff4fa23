"""Texts from texts: prompts and stop strings go in, and continuations come out as they grow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...data.tokenizers import Tokenizer
from .generator import Generator, required
from .requests import GeneratedToken, GenerationRequest
from .text import TextStream


@dataclass(frozen=True)
class TextRequest:
    """A request, and strings before which its text ends."""

    request: GenerationRequest
    stops: tuple[str, ...] = ()


@dataclass(eq=False)
class Continuation:
    """What follows a prompt so far.

    text    without the stop token or string that ended it
    tokens  all that were generated
    finish  "stop" or "length" once the text is over
    prompt_scores  of the prompt's tokens, if the request asks for them
    """

    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    finish: str | None = None
    prompt_scores: list[GeneratedToken] = field(default_factory=list)


class TextGenerator:
    """Continues texts on rank 0, through a generator that the other ranks follow."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer):
        self.generator = generator
        self._tokenizer = tokenizer

    def run(self, requests: Sequence[TextRequest]) -> list[Continuation]:
        """Return the continuation of each request, complete."""
        found = [Continuation() for _ in requests]
        for _ in self.stream(requests, found):
            pass
        return found

    def stream(
        self, requests: Sequence[TextRequest], found: Sequence[Continuation]
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of a request, what follows its text) and keep the continuations in `found` up to date."""
        # The generator names requests by numbers.
        generator = self.generator
        under_way = {}
        for index, asked in enumerate(requests):
            stream = TextStream(self._tokenizer, asked.request.tokens, asked.stops)
            under_way[generator.add(asked.request)] = index, asked.request, stream
        # A stop string ends a text before the generator does.
        while under_way:
            for number, event in generator.step():
                if number not in under_way:  # cancelled in the step before
                    continue
                index, request, stream = under_way[number]
                grown = found[index]
                if request.scores_prompt and not grown.tokens:
                    grown.prompt_scores = generator.prompt_scores(number)
                token = required(event)
                new = _extend(grown, stream, token, request)
                if grown.finish is not None:
                    del under_way[number]
                if grown.finish is not None and token.finish is None:
                    generator.cancel(number)
                yield index, new


def _extend(
    grown: Continuation,
    stream: TextStream,
    token: GeneratedToken,
    request: GenerationRequest,
) -> str:
    """Add a token to a continuation. Return the text that is certain with it."""
    grown.tokens.append(token)
    grown.finish = token.finish
    new = "" if token.token in request.stop_tokens else stream.add(token.token)
    if stream.is_stopped:
        grown.finish = "stop"
    elif grown.finish is not None:
        new += stream.finish()
    grown.text += new
    return new
