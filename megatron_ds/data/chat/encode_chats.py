"""A block of JSON lines with conversations, encoded."""

from dataclasses import dataclass

import numpy as np

from ..text.text_records import BadLine, TextBlock, record_in
from ..tokenizers import Tokenizer
from .conversation import conversation_of
from .loss_masks import ChatEncoder, MaskedTokens
from .template import ChatTemplate


@dataclass(frozen=True)
class EncodedChats:
    """Conversations one after the other.

    ids      int64 [n], all tokens
    mask     uint8 [n], 1 for the tokens to learn
    lengths  int64, the tokens of each conversation
    bad      lines without a usable conversation
    """

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    bad: list[BadLine]


def encode_chats(
    block: TextBlock, tokenizer: Tokenizer, template: ChatTemplate, eod: int | None
) -> EncodedChats:
    """Encode the lines of a block. Blank lines are ignored.  eod: id to append to each, or None."""
    encoder = ChatEncoder(template, tokenizer, eod)
    found: list[MaskedTokens] = []
    bad = []
    for number, line in zip(block.numbers, block.contents):
        if not line or line.isspace():
            continue
        try:
            found.append(_encoded(line, encoder))
        except ValueError as error:
            bad.append(BadLine(block.path, number, str(error), block.start, block.unit))
    # An empty array first: there may be no conversation at all.
    ids = [np.zeros(0, np.int64), *(each.ids for each in found)]
    masks = [np.zeros(0, np.uint8), *(each.mask for each in found)]
    lengths = np.array([len(each.ids) for each in found], np.int64)
    return EncodedChats(np.concatenate(ids), np.concatenate(masks), lengths, bad)


def _encoded(line: bytes, encoder: ChatEncoder) -> MaskedTokens:
    """Raises ValueError with the reason why a line is bad."""
    record = record_in(line)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    return encoder.encode(conversation_of(record))
