"""BERT's WordPiece from a `vocab.txt`, served by the `tokenizers` library; text in lower case without accents, or as it is.

`WordPiece` is the same in plain Python: the reference that the fast path is tested against. Devlin et al. 2019, section 3;
Wu et al. 2016 (arXiv:1609.08144), section 4.1: of a word, the longest piece of the vocabulary from the left, again and again.
"""

import unicodedata
from collections.abc import Mapping, Sequence

from ...errors import DataError
from .base import TOKENIZERS, Arrays, TokenizerOptions, fingerprint_of, flat, required_file

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 200                                          # characters; a longer one is unknown, as in Megatron
IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
              (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))     # each is a word of its own


class _BertWordPiece:
    """Ids of the text alone. `[SEP]` ends a document; `pad`, `unk`, `cls`, `sep`, `mask` are ids, `inv_vocab` id → token."""

    lower: bool

    def __init__(self, vocab: dict[str, int]):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
        self._tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lower)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = decoders.WordPiece()
        self.vocab, self.inv_vocab = vocab, {i: token for token, i in vocab.items()}
        self.pad, self.unk, self.cls, self.sep, self.mask = (vocab[token] for token in SPECIAL)
        self.vocab_size, self.eod = len(vocab), self.sep
        self.fingerprint = fingerprint_of(type(self).__name__, "\n".join(vocab).encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "_BertWordPiece":
        return cls(read_vocab(required_file(options, "vocab_file", cls.__name__)))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return flat(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Words with blanks between them: which white space stood there, and case, are not in the ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


@TOKENIZERS.register("BertWordPieceLowerCase")
class BertWordPieceLowerCase(_BertWordPiece):
    lower = True


@TOKENIZERS.register("BertWordPieceCase")
class BertWordPieceCase(_BertWordPiece):
    lower = False


def read_vocab(vocab_file: str) -> dict[str, int]:
    """One token a line, its id the number of the line from 0.  Raises DataError naming file and line."""
    try:
        with open(vocab_file, encoding="utf-8") as f:
            tokens = f.read().removesuffix("\n").split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--vocab-file {vocab_file} is not UTF-8 text: {e}.") from None
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocab.setdefault(token.rstrip("\r"), number) != number:
            raise DataError(f"--vocab-file {vocab_file}, line {number + 1}: {token!r} is in line {vocab[token] + 1} "
                            "already, and a token has only one id.")
    if missing := [token for token in SPECIAL if token not in vocab]:
        raise DataError(f"--vocab-file {vocab_file} has no {', '.join(missing)}, which BERT needs: it must be a vocab.txt "
                        "with one token per line.")
    return vocab


class WordPiece:
    """The reference. Clean the text, put blanks around ideographs, fold case and accents, cut at blanks and punctuation,
    then cut each word into pieces."""

    def __init__(self, vocab: Mapping[str, int], lower: bool):
        self._vocab, self._lower = vocab, lower

    def encode(self, text: str) -> list[int]:
        text = "".join(_spaced(c) for c in text if not _is_junk(c))
        if self._lower:
            text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
            text = "".join(c.lower() for c in text)         # each by itself: no sigma knows that it is the last
        words = "".join(f" {c} " if _is_punctuation(c) else c for c in text).split()
        return [i for word in words for i in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        unknown, ids, start = [self._vocab["[UNK]"]], [], 0
        if len(word) > LONGEST_WORD:
            return unknown
        while start < len(word):
            ends = range(len(word), start, -1)
            prefix = "##" if start else ""
            end = next((end for end in ends if prefix + word[start:end] in self._vocab), None)
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
    return c in "\0\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Cs") and c not in "\t\n\r"


def _is_punctuation(c: str) -> bool:
    return c.isascii() and not c.isalnum() and c.isprintable() and c != " " or unicodedata.category(c).startswith("P")
