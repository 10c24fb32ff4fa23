"""`WordPieces`: what masking must know of a vocabulary. Four special ids, and which ids continue a word."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError

SPECIAL = ("cls", "sep", "mask", "pad")


@dataclass(frozen=True, eq=False)
class WordPieces:
    """continues: bool [vocab_size], True for an id that goes on with the word of the id before it ("##ing")."""

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self.continues)


def pieces_of(tokenizer) -> WordPieces:
    """Raises ConfigError for a tokenizer without one of the special tokens."""
    missing = [name for name in SPECIAL if getattr(tokenizer, name, None) is None]
    if missing:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no {' and no '.join(f'[{name.upper()}]' for name in missing)} token, and a BERT "
            "sample is [CLS] A [SEP] B [SEP] with some tokens behind a [MASK], filled up with [PAD]. Use a tokenizer with "
            "BERT's special tokens, such as --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt.")
    return WordPieces(*(getattr(tokenizer, name) for name in SPECIAL), tokenizer.continues)
