"""`ServedText`: the text of one request, which grows as its tokens come."""

from collections.abc import Sequence
from typing import NamedTuple

from ...data.tokenizers import Tokenizer
from ..generation.requests import GeneratedToken
from ..generation.text import TextStream
from .served_tokens import TokenEntry, entry_of


class Delta(NamedTuple):
    """What is new of a text.

    entries  of new tokens, where log-probabilities are asked for
    offset   of the first of them, in characters of the text
    finish   "stop" or "length" at the end of the text, None before
    """

    text: str
    entries: list[TokenEntry]
    offset: int
    finish: str | None


class ServedText:
    """The text after a prompt, up to the first of `stops` or a stop token, which are not part of it.

    most    tokens that are kept; 0 for a prompt that is only scored
    count   tokens so far
    finish  as that of a `Delta`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        most: int,
    ):
        self.count = 0
        self.finish: str | None = None
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._most = most
        self._stream = TextStream(tokenizer, prompt, stops)
        # The text that each token adds, with the tokens of a stop string.
        self._pieces = TextStream(tokenizer, prompt)
        # Entries since the last `take`.
        self._text = ""
        self._entries: list[TokenEntry] = []
        self._offset = 0
        self._hidden = 0  # characters of the prompt's tokens that are not in an echo

    def echo(self, text: str | None) -> None:
        """Begin with the prompt. text: as it was given, without tokens that were put in front; None for tokens"""
        decoded = self._tokenizer.decode(self._prompt)
        self._text = decoded if text is None else text
        if decoded.endswith(self._text):
            self._hidden = len(decoded) - len(self._text)

    def add_prompt(self, scores: Sequence[GeneratedToken]) -> None:
        """Add the tokens of the prompt with their log-probabilities."""
        pieces = TextStream(self._tokenizer)
        for score in scores:
            piece = pieces.add(score.token)
            shown = piece[self._hidden :]
            self._hidden -= len(piece) - len(shown)
            self._add_entry(score, shown)

    def add(self, token: GeneratedToken) -> None:
        """Append a token."""
        if not self._most:
            self.finish = "length"
            return
        self.count += 1
        if token.finish == "stop":
            self._text += self._stream.finish()
            self.finish = "stop"
            self._add_entry(token, self._tokenizer.decode([token.token]))
            return
        self._text += self._stream.add(token.token)
        piece = self._pieces.add(token.token)
        if self._stream.is_stopped:
            self.finish = "stop"
        elif token.finish is not None:
            self.finish = token.finish
            self._text += self._stream.finish()
            piece += self._pieces.finish()
        self._add_entry(token, piece)

    def _add_entry(self, token: GeneratedToken, piece: str) -> None:
        self._entries.append(
            entry_of(
                self._tokenizer, piece, token.token, token.log_prob, token.alternatives
            )
        )

    def take(self) -> Delta:
        """Return what is new since the last call."""
        delta = Delta(self._text, self._entries, self._offset, self.finish)
        self._offset += sum(len(entry.text) for entry in self._entries)
        self._text = ""
        self._entries = []
        return delta
