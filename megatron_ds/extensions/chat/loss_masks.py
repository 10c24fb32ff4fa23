"""Tokens of a conversation, and for each of them whether it is learned."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ...data.tokenizers import Tokenizer
from .answer_spans import SHOWN_AROUND, Answers, Doubt, find_answers
from .content_exchange import AnswerNotFound
from .conversation import Conversation
from .template import ChatTemplate, Span

SHOWN = 300  # characters of a sample in a message
NO_END = (
    "an answer has no end that the model could learn: the template writes none, and no special token follows. Add "
    "--append-eod, or use a template that ends turns"
)


class DoubtCount(NamedTuple):
    """The number of conversations with a doubt, and what the first of them has."""

    number: int
    sample: str


Doubts = dict[str, DoubtCount]  # by reason


def add_doubts(doubts: Doubts, others: Doubts) -> None:
    """Add the counts of later conversations, in place."""
    for reason, other in others.items():
        known = doubts.get(reason, DoubtCount(0, other.sample))
        doubts[reason] = DoubtCount(known.number + other.number, known.sample)


class OffsetTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows the place of each token in the text.

    special_ids  ids of tokens such as <|im_end|>, which no ordinary text yields
    """

    special_ids: frozenset[int]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a text, and of each the characters that it stands for."""


class MaskedTokens(NamedTuple):
    """ids: int64 [n].  mask: uint8 [n], 1 for a token that is learned: predicted from those before it."""

    ids: np.ndarray
    mask: np.ndarray


class ChatEncoder:
    """Conversations to tokens and masks.

    eod: id that is appended to each conversation, or None. It is learned if the last message is an answer to
    which the template gives no end of its own.

    doubts: what is probably not meant in the conversations so far
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: OffsetTokenizer, eod: int | None = None
    ):
        self.template = template
        self.tokenizer = tokenizer
        self.eod = eod
        self.doubts: Doubts = {}

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """Encode a conversation. Raises AnswerNotFound, also for a mask of equal values, with the sample."""
        try:
            answers = find_answers(self.template, conversation)
        except AnswerNotFound as error:
            raise AnswerNotFound(f"{error}. {_shown(conversation.messages)}") from None
        ids, mask, open_ends = self._masked(answers)
        # A mask of equal values is a mistake in the template or the data.
        if mask.all() or not mask.any():
            number = "every token" if mask.all() else "no token"
            raise AnswerNotFound(f"{number} would be learned. {_shown(answers.text)}")
        if self.eod is not None:
            # The end of the document ends the last answer.
            inner = [stop for stop in open_ends if answers.text[stop:].strip()]
            is_learned = conversation.trained[-1] and len(inner) < len(open_ends)
            ids = np.append(ids, self.eod)
            mask = np.append(mask, mask.dtype.type(is_learned))
            open_ends = inner
        around = [
            answers.text[max(0, stop - SHOWN_AROUND) : stop] for stop in open_ends
        ]
        self._count([*answers.doubts, *(Doubt(NO_END, text) for text in around)])
        return MaskedTokens(ids, mask)

    def _count(self, doubts: Sequence[Doubt]) -> None:
        """Count each reason once for a conversation."""
        first = {doubt.reason: doubt.sample for doubt in reversed(doubts)}
        for reason, sample in first.items():
            count = DoubtCount(1, _shown(sample))
            add_doubts(self.doubts, {reason: count})

    def _masked(self, answers: Answers) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(ids, mask, places of answers that have no end to learn)."""
        ids, offsets = self.tokenizer.encode_with_offsets(answers.text)
        mask = np.zeros(len(ids), np.uint8)
        first, last = covered(offsets)
        for start, stop in answers.spans:
            mask |= (first < stop) & (
                (last > start) | (first == last) & (first >= start)
            )
        # Some models stop with the token that begins the next turn.
        open_ends = []
        for stop in answers.unended:
            following = self._special_after(stop, answers.text, ids, first)
            mask[following] = 1
            if not following:
                open_ends.append(stop)
        return np.array(ids, np.int64), mask, open_ends

    def _special_after(
        self, stop: int, text: str, ids: Sequence[int], first: np.ndarray
    ) -> list[int]:
        """Return the positions of the special token that follows an answer, and of the white space before it."""
        edges = [*first.tolist(), len(text)]
        passed = []
        # Tokens from the end of the answer on.
        begin = int(np.searchsorted(first, stop))
        for position in range(begin, len(ids)):
            passed.append(position)
            if ids[position] in self.tokenizer.special_ids:
                return passed
            # Only white space may be before it.
            part = text[edges[position] : edges[position + 1]]
            if part.strip():
                break
        return []


def covered(offsets: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first character of each token, and the one after its last, without gaps: some tokenizers leave out
    the white space of a token."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    before = (
        np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
        if len(stops)
        else stops
    )
    first = np.minimum(starts, before)
    return first, np.maximum(stops, first)


def _shown(sample: object) -> str:
    text = repr(sample)
    cut = f"{text[:SHOWN]}…" if len(text) > SHOWN else text
    return f"The sample: {cut}"
