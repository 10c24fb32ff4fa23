"""Byte-level BPE and WordPiece in plain Python: the references for the fast tokenizers.

Radford et al. 2019, section 2.2; Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1; Devlin et al. 2019,
section 3; Wu et al. 2016 (arXiv:1609.08144), section 4.1.
"""

import unicodedata
from collections.abc import Mapping, Sequence

import regex

from megatron_ds.extensions.tokenizers.backend import byte_letters
from megatron_ds.extensions.tokenizers.file_tokenizers import LONGEST_WORD, Pair

# A word with the space before it, a number, a run of signs, or white space (all of it but the last before a
# word).
PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)  # each is a word of its own


class ByteLevelBPE:
    """Cut the text into pieces, write each piece as bytes, then repeatedly merge the pair that was learned
    first."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[Pair]):
        self._ids = dict(vocab)
        self._order = {pair: rank for rank, pair in enumerate(merges)}
        self._pieces = regex.compile(PIECES)
        self._letters = byte_letters()

    def encode(self, text: str) -> list[int]:
        return [
            self._ids[token]
            for piece in self._pieces.findall(text)
            for token in self._merged(piece)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        tokens, bytes_of = (
            {i: t for t, i in self._ids.items()},
            {c: b for b, c in self._letters.items()},
        )
        return bytes(bytes_of[c] for i in ids for c in tokens[i]).decode(
            "utf-8", errors="replace"
        )

    def _merged(self, piece: str) -> list[str]:
        word = [self._letters[b] for b in piece.encode("utf-8")]
        while len(word) > 1:
            first = min(
                zip(word, word[1:]),
                key=lambda pair: self._order.get(pair, len(self._order)),
            )
            if first not in self._order:
                break
            word = _merge(word, first)
        return word


def _merge(word: list[str], pair: Pair) -> list[str]:
    """Each occurrence of `pair`, from the left, becomes one token."""
    out, i = [], 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


class WordPiece:
    """Clean the text, put spaces around ideographs, fold case and accents, cut at spaces and punctuation,
    then cut each word into the longest tokens of the vocabulary, from the left."""

    def __init__(self, vocab: Mapping[str, int], lower: bool):
        self._vocab, self._lower = vocab, lower

    def encode(self, text: str) -> list[int]:
        text = "".join(_spaced(c) for c in text if not _is_junk(c))
        if self._lower:
            text = "".join(
                c
                for c in unicodedata.normalize("NFD", text)
                if unicodedata.category(c) != "Mn"
            )
            # each by itself: a sigma at the end of a word is like any other
            text = "".join(c.lower() for c in text)
        words = "".join(f" {c} " if _is_punctuation(c) else c for c in text).split()
        return [i for word in words for i in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        unknown, ids, start = [self._vocab["[UNK]"]], [], 0
        if len(word) > LONGEST_WORD:
            return unknown
        while start < len(word):
            ends = range(len(word), start, -1)
            prefix = "##" if start else ""
            end = next(
                (end for end in ends if prefix + word[start:end] in self._vocab), None
            )
            if end is None:
                return unknown
            ids.append(self._vocab[prefix + word[start:end]])
            start = end
        return ids


def _spaced(c: str) -> str:
    if c in "\t\n\r" or unicodedata.category(c) == "Zs":
        return " "
    return f" {c} " if any(low <= ord(c) <= high for low, high in IDEOGRAPHS) else c


def _is_junk(c: str) -> bool:
    return (
        c in "\0\ufffd"
        or unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Cs")
        and c not in "\t\n\r"
    )


def _is_punctuation(c: str) -> bool:
    return (
        c.isascii()
        and not c.isalnum()
        and c.isprintable()
        and c != " "
        or unicodedata.category(c).startswith("P")
    )
