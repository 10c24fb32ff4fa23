"""`Seating`: which requests are under way, and in which row of keys of which data-parallel rank.

All ranks keep the same one, from the same orders: each so knows the next batch without a message.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .requests import GenerationRequest


@dataclass(eq=False)
class Text:
    """A request under way. new: the tokens generated so far; is_alone: its prompt has a micro-batch of its own."""

    number: int
    request: GenerationRequest
    is_alone: bool = False
    new: list[int] = field(default_factory=list)
    is_over: bool = False
    has_failed: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what follows it."""
        return (*self.request.tokens, *self.new)

    @property
    def cached(self) -> int:
        """Tokens whose keys are kept: all but the newest one, which the model has not read."""
        return len(self.request.tokens) + len(self.new) - 1

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not come next."""
        is_early = len(self.new) < self.request.min_new_tokens
        return self.request.stop_tokens if is_early else frozenset()

    def add(self, token: int) -> str | None:
        """Append a token. Return how the text ends with it, as `GeneratedToken.finish`."""
        self.new.append(token)
        finish = "length" if len(self.new) == self.request.max_new_tokens else None
        if token in self.request.stop_tokens:
            finish = "stop"
        self.is_over = finish is not None
        return finish


@dataclass(frozen=True)
class Orders:
    """What the leader asks of all ranks before a batch."""

    added: tuple[tuple[int, GenerationRequest], ...] = ()
    cancelled: tuple[int, ...] = ()


class Seating:
    """rows: of each of `ranks` data-parallel ranks."""

    def __init__(self, ranks: int, rows: int):
        self.rows = rows
        self.seated: list[list[Text]] = [[] for _ in range(ranks)]
        self.waiting: deque[Text] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, and none waits."""
        return not self.waiting and not any(self.seated)

    def follow(self, orders: Orders) -> None:
        """Add and cancel requests. One that is not known has ended already."""
        self.waiting += (Text(*added) for added in orders.added)
        gone = set(orders.cancelled)
        if not gone:
            return
        self.waiting = deque(t for t in self.waiting if t.number not in gone)
        for text in self._all_seated():
            text.is_over |= text.number in gone

    def fail(self, text: Text) -> bool:
        """End a text for which the model has no token. Return False if it begins again: values that are not finite
        may have come from another prompt of the micro-batch, as 0 times infinity is NaN."""
        text.is_over = True
        text.has_failed = True
        if text.is_alone or text.new:
            return True
        self.waiting.appendleft(Text(text.number, text.request, is_alone=True))
        return False

    def failed_rows(self, rank: int) -> list[int]:
        """Return the rows of a rank whose texts have failed, and will leave."""
        return [row for row, text in enumerate(self.seated[rank]) if text.has_failed]

    def leave(self, rank: int) -> list[tuple[int, int, int]]:
        """Free the rows of texts of a rank that are over, and fill the gaps with its last texts.

        Returns the moves, in order: (row, row to move to, tokens that are cached).
        """
        texts = self.seated[rank]
        moves = []
        for row in reversed(range(len(texts))):
            if not texts[row].is_over:
                continue
            last = texts.pop()
            if row < len(texts):
                texts[row] = last
                moves.append((len(texts), row, last.cached))
        return moves

    def admit(self) -> list[list[Text]]:
        """Give rows to texts that wait, after the others, while there is room. Return the new texts of each rank."""
        new: list[list[Text]] = [[] for _ in self.seated]
        while self.waiting:
            rank = min(range(len(new)), key=lambda r: len(self.seated[r]))
            if len(self.seated[rank]) == self.rows:
                break
            text = self.waiting.popleft()
            self.seated[rank].append(text)
            new[rank].append(text)
        return new

    def _all_seated(self) -> Iterable[Text]:
        return (text for texts in self.seated for text in texts)
