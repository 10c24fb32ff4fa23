"""`TextStream`: text from tokens that arrive one at a time, up to the first stop string."""

from collections.abc import Sequence

from ...data.tokenizers import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # for bytes that are not yet a whole character
CONTEXT = 8  # tokens of the prompt that are decoded with the first ones, for the space between them
MOST_PARTS = 8  # tokens of one character; more are bytes that are none


class TextStream:
    """The text that follows a prompt.

    stops  the text ends before the first of these strings
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
    ):
        self._decode = tokenizer.decode
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens = list(prompt[-CONTEXT:])
        # Number of tokens whose text is known, without those of a character that is not complete.
        self._known = len(self._tokens)
        while self._decode(self._tokens[: self._known]).endswith(BROKEN):
            self._known -= 1
        self._text = ""
        self._given = 0  # characters that `add` has returned
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All that is known so far."""
        return self._text

    def add(self, token: int) -> str:
        """Return the text that is certain with a further token: whole characters, without the beginning of a stop
        string. `is_stopped` is true from the token on that completes one."""
        self._tokens.append(token)
        self._read(len(self._tokens) - self._known > MOST_PARTS)
        return self._give(len(self._text) - self._held())

    def finish(self) -> str:
        """Return the rest of the text when no more tokens follow."""
        self._read(True)
        return self._give(len(self._text))

    def _read(self, is_forced: bool) -> None:
        """Append the text of new tokens, decoded together with those before them, and cut it at a stop string."""
        known = self._decode(self._tokens[: self._known])
        now = self._decode(self._tokens)
        if self.is_stopped or now.endswith(BROKEN) and not is_forced:
            return
        searched = len(self._text)
        self._text += now[len(known) :]
        self._tokens = self._tokens[self._known :] or self._tokens
        self._known = len(self._tokens)
        # A stop string may begin in what was known before.
        longest = max(map(len, self._stops), default=0)
        start = max(0, searched - longest + 1)
        found = [at for s in self._stops if (at := self._text.find(s, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.is_stopped = True

    def _held(self) -> int:
        """Characters at the end with which a stop string may begin."""
        if self.is_stopped:
            return 0
        held = 0
        for stop in self._stops:
            begun = (n for n in range(1, len(stop)) if self._text.endswith(stop[:n]))
            held = max(held, *begun, 0)
        return held

    def _give(self, stop: int) -> str:
        text = self._text[self._given : stop]
        self._given = max(self._given, stop)
        return text
