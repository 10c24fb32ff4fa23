"""Greedy continuations of texts, by a generator.

Under context parallelism no rank keeps the keys of whole texts. There each step scores one token after every text,
which costs a forward over the whole text for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...data.tokenizers import Tokenizer
from ..generation.continuation import TextGenerator, TextRequest
from ..generation.requests import GenerationRequest, Sampling
from .leading_rank import Score
from .score_plan import ScoreRequest


@dataclass(frozen=True)
class Prompt:
    """tokens: what is continued; until: texts at whose first occurrence the continuation ends, without it."""

    tokens: tuple[int, ...]
    until: tuple[str, ...]
    max_new_tokens: int


def continue_greedily(
    score: Score,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_length: int,
    ends: frozenset[int] = frozenset(),
) -> list[str]:
    """Return the continuation of each prompt. It also ends at the end of a document, at one of the tokens `ends`,
    and after `max_length` tokens in all."""
    stops = ends | {tokenizer.eod}
    if score.generates:
        asked = []
        for prompt in prompts:
            request = GenerationRequest(
                prompt.tokens, Sampling(0.0), prompt.max_new_tokens, stop_tokens=stops
            )
            asked.append(TextRequest(request, prompt.until))
        run = lambda generator: TextGenerator(generator, tokenizer).run(asked)
        return [continuation.text for continuation in score.with_generator(run)]
    texts = [_Text(prompt, tokenizer, max_length, stops) for prompt in prompts]
    while growing := [text for text in texts if not text.is_complete]:
        found = score([text.request for text in growing])
        for text, scored in zip(growing, found, strict=True):
            text.add(int(scored.likeliest[0]))
    return [text.continuation for text in texts]


class _Text:
    """A prompt, and the tokens that follow it so far."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        max_length: int,
        stops: frozenset[int],
    ):
        self.prompt = prompt
        self.stops = stops
        self.tokenizer = tokenizer
        room = max_length + 1 - len(prompt.tokens)
        self.most = min(prompt.max_new_tokens, room)
        self.new: list[int] = []
        self.is_complete = self.most < 1

    @property
    def request(self) -> ScoreRequest:
        """Return a request that scores any token at the next place, since a score names the likeliest one there."""
        return ScoreRequest((*self.prompt.tokens, *self.new, 0), 1)

    @property
    def continuation(self) -> str:
        """The new text up to the first end."""
        text = self._decoded()
        for end in self.prompt.until:
            text = text.split(end)[0]
        return text

    def add(self, token: int) -> None:
        """Append a token; one that ends the text is not kept."""
        ends = token in self.stops
        if not ends:
            self.new.append(token)
        is_full = len(self.new) >= self.most
        self.is_complete = ends or is_full or self._holds_an_end()

    def _holds_an_end(self) -> bool:
        text = self._decoded()
        return any(end in text for end in self.prompt.until)

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.new)
