"""`WordPieces`: what masking must know of a vocabulary. Four special ids, and which ids continue a word."""

from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError

SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
CONTINUES = "##"                     # how WordPiece marks a piece that is not the first of its word


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
    """From `tokenizer.vocab`, {text of a token: id}. Raises ConfigError for a tokenizer without one of the special tokens."""
    vocab = getattr(tokenizer, "vocab", {})
    missing = [token for token in SPECIAL if token not in vocab]
    if missing:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no {' and no '.join(missing)} token, and a BERT sample is "
            "[CLS] A [SEP] B [SEP] with some tokens replaced by [MASK], padded with [PAD]. Use a tokenizer with BERT's "
            "tokens, such as --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt.")
    continues = np.zeros(tokenizer.vocab_size, bool)
    continues[[i for token, i in vocab.items() if token.startswith(CONTINUES)]] = True
    return WordPieces(*(vocab[token] for token in SPECIAL), continues)
