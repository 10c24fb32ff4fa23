"""Masking for BERT: which tokens are hidden, and what replaces them; Megatron's rules and random numbers.

Tokens are chosen as n-grams of whole words (Devlin et al. 2019, arXiv:1810.04805, section 3.1, and the
whole-word masking of its authors' code; n-grams as in Joshi et al. 2020 and Lan et al. 2020 (ALBERT), section
3.1): shorter ones more often, in proportion to 1/n. Of the chosen tokens 80 % become [MASK], 10 % a random
token, 10 % stay.

    [CLS] the  un ##aff ##able  man [SEP] spoke [SEP]    candidates: the | un ##aff ##able | man | spoke
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError

if TYPE_CHECKING:
    from ...data.tokenizers import Tokenizer

SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
CONTINUES = "##"  # marks a piece that is not the first of its word
# share that becomes [MASK]; of the rest, share that becomes another token
MASKED = 0.8
REPLACED = 0.5


@dataclass(frozen=True, eq=False)
class WordPieces:
    """The ids of a vocabulary that masking needs.

    continues: bool [vocab_size], True for an id that continues the word of the id before it ("##ing").
    """

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.continues)


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen for prediction.

    probability  share of the tokens that are chosen
    max_ngram    largest number of consecutive words that are chosen together
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True

    @cached_property
    def lengths(self) -> np.ndarray:
        """Cumulative probabilities of n = 1, 2, …, as `RandomState.choice` sums them."""
        p = 1.0 / np.arange(1, self.max_ngram + 1)
        p /= p.sum()
        p /= p.sum()
        total = p.cumsum()
        return total / total[-1]

    def most(self, length: int, target: int) -> float:
        """Return how many tokens of a sample of `length` are chosen at most.  target: the requested length."""
        return min(self.probability * target, max(1, round(length * self.probability)))


def mask_tokens(
    tokens: np.ndarray,
    target: int,
    pieces: WordPieces,
    masking: Masking,
    random: np.random.RandomState,
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens with some of them hidden, sorted positions of all chosen ones).  tokens: int64 [length]."""
    # Whole words are hidden, so places are grouped into words.
    places, starts = candidates(tokens, pieces, masking.whole_words)
    bounds = [*starts.tolist(), len(places)]
    places = places.tolist()
    most = masking.most(len(tokens), target)
    last = len(starts)
    hidden = tokens.copy()
    chosen: set[int] = set()
    # Words are taken in random order, each with some of the words after it, until enough are chosen.
    for first in random.permutation(last).tolist():
        if len(chosen) >= most:
            break
        n = int(masking.lengths.searchsorted(random.random_sample(), side="right")) + 1
        end = min(first + n, last)
        while end > first and len(chosen) + bounds[end] - bounds[first] > most:
            end -= 1
        positions = places[bounds[first] : bounds[end]]
        if not positions or not chosen.isdisjoint(positions):
            continue
        # Most chosen tokens are masked; some are replaced, and others are left as they are.
        for at in positions:
            if random.random_sample() < MASKED:
                hidden[at] = pieces.mask
            elif random.random_sample() >= REPLACED:
                hidden[at] = random.randint(0, pieces.vocab_size)
        chosen.update(positions)
    return hidden, np.array(sorted(chosen), np.int64)


def candidates(
    tokens: np.ndarray, pieces: WordPieces, whole_words: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(positions that may be chosen, index in them of the start of each word). Special tokens are not chosen.

    A piece that continues a word whose beginning was cut off belongs to the word before it, as in Megatron.
    """
    places = np.flatnonzero((tokens != pieces.cls) & (tokens != pieces.sep))
    begins = (
        ~pieces.continues[tokens[places]] if whole_words else np.ones(len(places), bool)
    )
    begins[:1] = True
    return places, np.flatnonzero(begins)


def pieces_of(tokenizer: "Tokenizer") -> WordPieces:
    """Return the word pieces in `tokenizer.vocab`, {token: id}. Raises ConfigError without BERT's special tokens."""
    vocab = getattr(tokenizer, "vocab", {})
    missing = [token for token in SPECIAL if token not in vocab]
    if missing:
        raise ConfigError(
            f"{type(tokenizer).__name__} has no {' and no '.join(missing)} token, and a BERT sample is [CLS] "
            "A [SEP] B [SEP] with some tokens replaced by [MASK], padded with [PAD]. Use a tokenizer with "
            "BERT's tokens, such as --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt."
        )
    continues = np.zeros(tokenizer.vocab_size, bool)
    continues[[i for token, i in vocab.items() if token.startswith(CONTINUES)]] = True
    cls, sep, mask, pad = (vocab[token] for token in SPECIAL)
    return WordPieces(cls, sep, mask, pad, continues)
