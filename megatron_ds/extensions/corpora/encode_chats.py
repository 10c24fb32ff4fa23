"""A block of JSON lines with conversations, or with pairs of them, encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ...data.tokenizers import Tokenizer
from ..chat.conversation import conversation_of
from ..chat.loss_masks import ChatEncoder, Doubts, MaskedTokens, OffsetTokenizer
from ..chat.template import ChatTemplate
from .preference_pair import pair_of
from .text_records import BadLine, TextBlock, record_in


@dataclass(frozen=True)
class EncodedChats:
    """Conversations one after the other.

    ids        int64 [n], all tokens
    mask       uint8 [n], 1 for the tokens to learn
    lengths    int64, the tokens of each conversation
    sequences  int64, the conversations of each line: one, or two of a pair
    bad        lines without a usable conversation
    doubts     what is probably not meant in them
    """

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray
    bad: list[BadLine]
    doubts: Doubts


def encode_chats(
    block: TextBlock,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    eod: int | None,
    are_pairs: bool = False,
) -> EncodedChats:
    """Encode the lines or rows of a block. Blank lines are ignored.

    eod: id to append to each conversation, or None.  are_pairs: a line has the chosen answer and the rejected one
    """
    # The flags allow no other tokenizer with conversations.
    encoder = ChatEncoder(template, cast(OffsetTokenizer, tokenizer), eod)
    found: list[MaskedTokens] = []
    sequences = []
    bad = []
    for number, content in zip(block.numbers, block.contents):
        if isinstance(content, bytes) and (not content or content.isspace()):
            continue
        try:
            of_line = _encoded(content, encoder, are_pairs)
        except ValueError as error:
            bad.append(BadLine(block.path, number, str(error), block.start, block.unit))
            continue
        found += of_line
        sequences.append(len(of_line))
    # An empty array first: there may be no conversation at all.
    ids = [np.zeros(0, np.int64), *(each.ids for each in found)]
    masks = [np.zeros(0, np.uint8), *(each.mask for each in found)]
    lengths = np.array([len(each.ids) for each in found], np.int64)
    return EncodedChats(
        np.concatenate(ids),
        np.concatenate(masks),
        lengths,
        np.array(sequences, np.int64),
        bad,
        encoder.doubts,
    )


def _encoded(
    content: bytes | tuple | dict, encoder: ChatEncoder, is_pair: bool
) -> Sequence[MaskedTokens]:
    """Raises ValueError with the reason why a line or a row is bad."""
    record = record_in(content) if isinstance(content, bytes) else content
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    conversations = pair_of(record) if is_pair else [conversation_of(record)]
    return [encoder.encode(each) for each in conversations]
