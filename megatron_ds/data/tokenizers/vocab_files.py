"""Tokenizers of vocabulary files, by the `tokenizers` library: GPT-2's byte-level BPE and BERT's WordPiece.

GPT2BPETokenizer reads `vocab.json` and `merges.txt` (Radford et al. 2019, section 2.2; Sennrich et al. 2016,
arXiv:1508.07909, algorithm 1). BertWordPiece… reads `vocab.txt` (Devlin et al. 2019, section 3; Wu et al.
2016, arXiv:1609.08144, section 4.1): of a word, the longest token of the vocabulary from the left,
repeatedly.
"""

import json
from collections.abc import Mapping

from ...errors import DataError
from .backend import LibraryTokenizer
from .base import TOKENIZERS, TokenizerOptions, fingerprint_of, required_files

EOD = "<|endoftext|>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 200                                      # characters; a longer word is unknown, as in Megatron
Pair = tuple[str, str]


@TOKENIZERS.register("GPT2BPETokenizer")
class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's tokenizer over any vocabulary of that form. `<|endoftext|>` in a text is plain text."""

    has_backends = True

    def __init__(self, vocab: dict[str, int], merges: list[Pair], backend: str = "auto"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer, backend)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = vocab[EOD]
        self.fingerprint = fingerprint_of("GPT2BPETokenizer", json.dumps(sorted(vocab.items())).encode(),
                                          json.dumps(merges).encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "GPT2BPETokenizer":
        files = required_files(options, ("vocab_file", "merge_file"), "GPT2BPETokenizer")
        return cls(*read_bpe_files(*files), options.backend)


def read_bpe_files(vocab_file: str, merge_file: str) -> tuple[dict[str, int], list[Pair]]:
    """({token: id}, merges). Raises DataError naming the file that is damaged or has no `<|endoftext|>`."""
    try:
        with open(vocab_file, encoding="utf-8") as f:
            vocab = json.load(f)
    except ValueError as e:                                 # JSON and UTF-8 errors are both ValueErrors
        raise DataError(f"--vocab-file {vocab_file} is not JSON text: {e}.") from None
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise DataError(f"--vocab-file {vocab_file} is not a JSON object from token to id.")
    if EOD not in vocab:
        raise DataError(f"--vocab-file {vocab_file} has no token {EOD}, which ends a document.")
    return vocab, _read_merges(merge_file, vocab)


def _read_merges(merge_file: str, vocab: Mapping[str, int]) -> list[Pair]:
    try:
        with open(merge_file, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--merge-file {merge_file} is not UTF-8 text: {e}.") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or number == 1 and line.startswith("#version"):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise DataError(f"--merge-file {merge_file}, line {number}: {line!r} is not two tokens that are "
                            "in the vocabulary together with their concatenation. Check that --vocab-file "
                            "and --merge-file belong together.")
        merges.append(pair)
    return merges


class _BertWordPiece(LibraryTokenizer):
    """`[SEP]` ends a document. `pad`, `unk`, `cls`, `sep`, `mask` are ids; `inv_vocab` is {id: token}.

    `decode` puts spaces between words: ids hold neither the original white space nor, in lower case, the
    case.
    """

    lower: bool

    def __init__(self, vocab: dict[str, int]):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]",
                                               max_input_chars_per_word=LONGEST_WORD))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lower)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        super().__init__(tokenizer, "tokenizers")
        self.vocab, self.inv_vocab = vocab, {i: token for token, i in vocab.items()}
        self.pad, self.unk, self.cls, self.sep, self.mask = (vocab[token] for token in BERT_TOKENS)
        self.vocab_size, self.eod = len(vocab), self.sep
        self.fingerprint = fingerprint_of(type(self).__name__, "\n".join(vocab).encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "_BertWordPiece":
        return cls(read_vocab(*required_files(options, ("vocab_file",), cls.__name__)))


@TOKENIZERS.register("BertWordPieceLowerCase")
class BertWordPieceLowerCase(_BertWordPiece):
    """Text becomes lower case without accents."""

    lower = True


@TOKENIZERS.register("BertWordPieceCase")
class BertWordPieceCase(_BertWordPiece):
    """Text keeps case and accents."""

    lower = False


def read_vocab(vocab_file: str) -> dict[str, int]:
    """{token: line number from 0} of a file with one token per line.  Raises DataError naming the line."""
    try:
        with open(vocab_file, encoding="utf-8") as f:
            tokens = f.read().removesuffix("\n").split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--vocab-file {vocab_file} is not UTF-8 text: {e}.") from None
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocab.setdefault(token.rstrip("\r"), number) != number:
            raise DataError(f"--vocab-file {vocab_file}, line {number + 1}: {token!r} is in line "
                            f"{vocab[token] + 1} already, and a token has only one id.")
    if missing := [token for token in BERT_TOKENS if token not in vocab]:
        raise DataError(f"--vocab-file {vocab_file} has no {', '.join(missing)}, which BERT needs: it must "
                        "be a vocab.txt with one token per line.")
    return vocab
