"""Tokens of a conversation, and for each of them whether it is learned."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ...data.tokenizers import Tokenizer
from .answer_spans import STAND_INS, AnswerNotFound, Answers, find_answers
from .conversation import Conversation
from .template import ChatTemplate, Span, TemplateRefusal

SHOWN = 300  # characters of a sample in a message


class OffsetTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows the place of each token in the text.

    special_ids  ids of tokens such as <|im_end|>, which no ordinary text yields
    """

    special_ids: frozenset[int]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text, and of each the characters that it stands for."""


class MaskedTokens(NamedTuple):
    """ids: int64 [n].  mask: uint8 [n], 1 for a token that is learned: predicted from those before it."""

    ids: np.ndarray
    mask: np.ndarray


class ChatEncoder:
    """Conversations to tokens and masks.

    eod: id that is appended to each conversation, or None. It is learned if the last message is an answer to
    which the template gives no end of its own.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: OffsetTokenizer, eod: int | None = None
    ):
        self.template = template
        self.tokenizer = tokenizer
        self.eod = eod
        self.turn_end = turn_end_of(template, tokenizer)

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """Raises AnswerNotFound, also for a mask that is all ones or all zeros; the message shows the sample."""
        try:
            answers = find_answers(self.template, conversation)
        except AnswerNotFound as error:
            raise AnswerNotFound(f"{error}. {_shown(conversation.messages)}") from None
        ids, mask = self._masked(answers)
        # A mask of equal values is a mistake in the template or the data.
        if mask.all() or not mask.any():
            number = "every token" if mask.all() else "no token"
            raise AnswerNotFound(f"{number} would be learned. {_shown(answers.text)}")
        if self.eod is None:
            return MaskedTokens(ids, mask)
        is_learned = not self.turn_end and conversation.trained[-1]
        return MaskedTokens(
            np.append(ids, self.eod), np.append(mask, mask.dtype.type(is_learned))
        )

    def _masked(self, answers: Answers) -> MaskedTokens:
        text = answers.text
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        mask = np.zeros(len(ids), np.uint8)
        first, last = covered(offsets)
        for start, stop in answers.spans:
            # The end of a turn is learned with it.
            if self.turn_end and text.startswith(self.turn_end, stop):
                stop = stop + len(self.turn_end)
            mask |= (first < stop) & (
                (last > start) | (first == last) & (first >= start)
            )
        return MaskedTokens(np.array(ids, np.int64), mask)


def covered(offsets: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """The first character of each token, and the one after its last, without gaps: some tokenizers leave out
    the white space of a token."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    before = (
        np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
        if len(stops)
        else stops
    )
    first = np.minimum(starts, before)
    return first, np.maximum(stops, first)


def turn_end_of(template: ChatTemplate, tokenizer: OffsetTokenizer) -> str:
    """What ends the last answer of a conversation: a special token, after white space or none; "" without one."""
    text = _one_round(template)
    answer = STAND_INS[1]
    stop = text.rfind(answer) + len(answer)
    after = text[stop:]
    ids, offsets = tokenizer.encode_with_offsets(after)
    for number, (first, last) in zip(ids, offsets):
        if number in tokenizer.special_ids:
            return after[:last]
        if after[first:last].strip():
            break
    return ""


def _one_round(template: ChatTemplate) -> str:
    """The text of a question and an answer, after a system message if the template requires one."""
    question, answer = STAND_INS
    system = {"role": "system", "content": question}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    for form in (messages, [system, *messages]):
        try:
            return template.render(form)
        except TemplateRefusal:
            continue
    return ""


def _shown(sample: object) -> str:
    text = repr(sample)
    cut = f"{text[:SHOWN]}…" if len(text) > SHOWN else text
    return f"The sample: {cut}"
