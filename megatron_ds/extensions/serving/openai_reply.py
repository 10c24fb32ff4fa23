"""`OpenAIReply`: the answer of OpenAI's endpoints, whole or in chunks; `ReplyPart`, one text of it."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..generation.requests import GenerationRequest
from .sampling_fields import SamplingFields
from .served_model import ServedModel
from .served_text import Delta, ServedText

Json = dict[str, Any]


@dataclass(frozen=True)
class ReplyPart:
    """A request to the generator, and the text that comes of it."""

    request: GenerationRequest
    text: ServedText


class OpenAIReply:
    """parts: of the choices, in their order. asked: the fields of the request.

    streams  whether the answer is sent in chunks
    prefix   of the answer's id
    kinds    "object" of a whole answer, and of a chunk
    """

    prefix: str
    kinds: tuple[str, str]

    def __init__(
        self, parts: Sequence[ReplyPart], asked: SamplingFields, model: ServedModel
    ):
        self.parts = tuple(parts)
        self.asked = asked
        self.streams = asked.stream
        self._ends_with_usage = asked.wants_usage()
        self._model = model.name
        self._id = f"{self.prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())

    @property
    def shows_log_probs(self) -> bool:
        """Whether choices have log-probabilities."""
        raise NotImplementedError

    def choice(self, index: int, delta: Delta, is_chunk: bool) -> Json:
        """One element of "choices"."""
        raise NotImplementedError

    def opening(self) -> Iterator[Json]:
        """Chunks before all texts."""
        return iter(())

    def chunk(self, index: int) -> Iterator[Json]:
        """Yield a chunk with what is new of a text, if anything is."""
        delta = self.parts[index].text.take()
        has_log_probs = bool(delta.entries) and self.shows_log_probs
        if delta.text or delta.finish or has_log_probs:
            yield self.envelope([self.choice(index, delta, True)], True)

    def ending(self) -> Iterator[Json]:
        """Chunks after all texts."""
        if self._ends_with_usage:
            yield {**self.envelope([], True), "usage": self._usage()}

    def whole(self) -> Json:
        """Return the whole answer."""
        choices = [
            self.choice(index, part.text.take(), False)
            for index, part in enumerate(self.parts)
        ]
        return {**self.envelope(choices, False), "usage": self._usage()}

    def envelope(self, choices: list[Json], is_chunk: bool) -> Json:
        """Return the object around some choices."""
        found = {
            "id": self._id,
            "object": self.kinds[is_chunk],
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return found | ({"usage": None} if self._ends_with_usage else {})

    def _usage(self) -> Json:
        """Numbers of tokens. A prompt with several continuations counts once."""
        prompts = self.parts[:: self.asked.n]
        read = sum(len(part.request.tokens) for part in prompts)
        written = sum(part.text.count for part in self.parts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
