"""Tokenizers that are read from files: `--tokenizer-model`, or `--vocab-file` and `--merge-file`.

HuggingFaceTokenizer, SentencePieceTokenizer and Llama2Tokenizer read one file. GPT2BPETokenizer reads
`vocab.json` and `merges.txt` (Radford et al. 2019, section 2.2; Sennrich et al. 2016, arXiv:1508.07909,
algorithm 1). `WordPieceTokenizer`, which features register, reads `vocab.txt` (Devlin et al. 2019, section 3;
Wu et al. 2016, arXiv:1609.08144, section 4.1): of a word, the longest token of the vocabulary from the left, again
and again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...data.tokenizers.base import (
    TOKENIZERS,
    Tokenizer,
    TokenizerOptions,
    fingerprint_of,
    required_files,
)
from ...errors import DataError
from ...host.packages import import_extra
from ...host.regular_file import read_regular, read_text
from .backend import LibraryTokenizer, library_panics
from .special_tokens import LARGEST, end_of_document, read_json_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryModel
    from tokenizers.models import Model

EOD = "<|endoftext|>"
WORD_PIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 200  # characters; a longer word is unknown, as in Megatron
MOST_IDS = 10**8  # no vocabulary is so large; ids are int32 in corpora
Pair = tuple[str, str]


@TOKENIZERS.register("HuggingFaceTokenizer", "HFTokenizer")
class HuggingFaceTokenizer(LibraryTokenizer):
    """Any `tokenizer.json`, or a folder with one. Its template (such as `[CLS] … [SEP]`) is not applied.

    added: special tokens that the vocabulary gets where the file does not have them.
    """

    has_backends = True
    kind = "HuggingFaceTokenizer"
    added: tuple[str, ...] = ()

    def __init__(self, path: str, backend: str = "auto"):
        from tokenizers import Tokenizer

        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        with library_panics(f"--tokenizer-model {file} cannot be read as a tokenizer"):
            try:
                content = read_regular(file, DataError, LARGEST)
                tokenizer = Tokenizer.from_buffer(content)
            except Exception as e:  # the library raises plain Exception for everything
                raise DataError(
                    f"--tokenizer-model {path}: {file} cannot be read as a tokenizer: "
                    f"{e}."
                ) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens(list(self.added))
        super().__init__(tokenizer, backend)
        self.vocab = tokenizer.get_vocab(with_added_tokens=True)
        check_ids(self.vocab, f"--tokenizer-model {file}")
        self.base_size = tokenizer.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(self.vocab.values()) + 1
        self.eod = end_of_document(file, self.vocab)
        self.fingerprint = fingerprint_of(self.kind, tokenizer.to_str().encode())

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "HuggingFaceTokenizer":
        (path,) = required_files(
            options, ("tokenizer_model",), cls.kind, folder_ok=True
        )
        if os.path.isdir(path) and not os.path.exists(f"{path}/tokenizer.json"):
            raise DataError(
                f"--tokenizer-model {path}: the folder has no tokenizer.json. AutoTokenizer of transformers writes one "
                "with save_pretrained(DIR); SentencePieceTokenizer reads a tokenizer.model."
            )
        return cls(path, options.backend)


@TOKENIZERS.register("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`. No begin and end tokens are added; end of sentence ends a document."""

    kind = "SentencePieceTokenizer"

    def __init__(self, path: str):
        sentencepiece = import_extra(f"--tokenizer-model {path}", "sentencepiece", "hf")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as e:
            raise DataError(
                f"--tokenizer-model {path} cannot be read as a sentencepiece model: "
                f"{e}."
            ) from None
        self.vocab_size = self._processor.vocab_size()
        self.eod = self.end_of_document(path)
        self.fingerprint = fingerprint_of(
            self.kind, self._processor.serialized_model_proto()
        )

    def end_of_document(self, path: str) -> int:
        """Return the token that ends a document. Raises DataError if the model has none."""
        end = self._processor.eos_id()
        if end < 0:
            raise DataError(
                f"--tokenizer-model {path} has no end of sentence token (eos_id is off), which "
                "ends a document. Train the model with one."
            )
        return end

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "SentencePieceTokenizer":
        return cls(*required_files(options, ("tokenizer_model",), cls.__name__))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        # A model may have more rows than the tokenizer has pieces, and generate one of them.
        pieces = range(self._processor.get_piece_size())
        return self._processor.decode([i for i in map(int, ids) if i in pieces])


@TOKENIZERS.register("Llama2Tokenizer")
class Llama2Tokenizer(SentencePieceTokenizer):
    """A sentencepiece `.model` as Megatron's Llama2Tokenizer reads it: each text begins with BOS."""

    kind = "Llama2Tokenizer"

    def __init__(self, path: str):
        super().__init__(path)
        self._bos = self._processor.bos_id()
        if self._bos < 0:
            raise DataError(
                f"--tokenizer-model {path} has no begin of sentence token (bos_id is off), with "
                "which Llama2Tokenizer begins each text. Use SentencePieceTokenizer."
            )

    @property
    def beginning(self) -> tuple[int, ...]:
        """The token with which `encode` begins each text."""
        return (self._bos,)

    def encode(self, text: str) -> list[int]:
        return [self._bos, *super().encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._bos, *ids] for ids in super().encode_batch(texts)]


def byte_level(model: "Model") -> "LibraryModel":
    """Return the library's tokenizer over a byte-level BPE model, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece(model: "Model", lower: bool) -> "LibraryModel":
    """Return the library's tokenizer over a WordPiece model."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@TOKENIZERS.register("GPT2BPETokenizer")
class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's tokenizer over any vocabulary of that form. `<|endoftext|>` in a text is plain text."""

    has_backends = True

    def __init__(
        self, vocab: dict[str, int], merges: list[Pair], backend: str = "auto"
    ):
        from tokenizers import models

        super().__init__(byte_level(models.BPE(vocab, merges)), backend)
        self.vocab_size = max(vocab.values()) + 1
        self.eod = vocab[EOD]
        self.fingerprint = fingerprint_of(
            "GPT2BPETokenizer",
            json.dumps(sorted(vocab.items())).encode(),
            json.dumps(merges).encode(),
        )

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "GPT2BPETokenizer":
        files = required_files(
            options, ("vocab_file", "merge_file"), "GPT2BPETokenizer"
        )
        return cls(*read_bpe_files(*files), options.backend)


def read_bpe_files(
    vocab_file: str, merge_file: str
) -> tuple[dict[str, int], list[Pair]]:
    """Return ({token: id}, merges). Raises DataError naming the file that is damaged or has no `<|endoftext|>`."""
    vocab = read_json_text(vocab_file, f"--vocab-file {vocab_file}")
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise DataError(
            f"--vocab-file {vocab_file} is not a JSON object from token to id."
        )
    check_ids(vocab, f"--vocab-file {vocab_file}")
    check_distinct(vocab, f"--vocab-file {vocab_file}")
    if EOD not in vocab:
        raise DataError(
            f"--vocab-file {vocab_file} has no token {EOD}, which ends a document. Add it with "
            "an unused id."
        )
    return vocab, _read_merges(merge_file, vocab)


def check_ids(vocab: Mapping[str, int], name: str) -> None:
    """Raises DataError for an id that no token has. name: of the file, for the message."""
    if odd := next(
        (token for token, i in vocab.items() if not 0 <= i < MOST_IDS), None
    ):
        raise DataError(
            f"{name} has the id {vocab[odd]} for {odd!r}: ids are numbers from 0 to "
            f"{MOST_IDS - 1:,}, and the vocabulary is as large as the largest. The file is "
            "damaged."
        )


def check_distinct(vocab: Mapping[str, int], name: str) -> None:
    """Raises DataError for two tokens with one id: the id would have two texts."""
    tokens: dict[int, str] = {}
    for token, i in vocab.items():
        if (first := tokens.setdefault(i, token)) != token:
            raise DataError(
                f"{name} has the id {i} for {first!r} and for {token!r}, and an id is one token. "
                "The file is damaged."
            )


def _read_merges(merge_file: str, vocab: Mapping[str, int]) -> list[Pair]:
    try:
        text = read_text(merge_file, DataError, f"--merge-file {merge_file}")
        lines = text.split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--merge-file {merge_file} is not UTF-8 text: {e}.") from None
    merges = []
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or number == 1 and line.startswith("#version"):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise DataError(
                f"--merge-file {merge_file}, line {number}: {line!r} is not two tokens that are "
                "in the vocabulary together with their concatenation. Check that --vocab-file "
                "and --merge-file belong together."
            )
        merges.append(pair)
    return merges


class WordPieceTokenizer(LibraryTokenizer):
    """`[SEP]` ends a document. `pad`, `unk`, `cls`, `sep`, `mask` are ids; `inv_vocab` is {id: token}.

    `decode` puts spaces between words: ids hold neither the original white space nor, in lower case, the
    case.
    """

    lower: bool

    def __init__(self, vocab: dict[str, int]):
        from tokenizers import models

        model = models.WordPiece(
            vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD
        )
        super().__init__(word_piece(model, self.lower), "tokenizers")
        self.vocab = vocab
        self.inv_vocab = {i: token for token, i in vocab.items()}
        self.pad, self.unk, self.cls, self.sep, self.mask = (
            vocab[token] for token in WORD_PIECE_TOKENS
        )
        self.vocab_size = len(vocab)
        self.eod = self.sep
        self.fingerprint = fingerprint_of(
            type(self).__name__, "\n".join(vocab).encode()
        )

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "WordPieceTokenizer":
        return cls(read_vocab(*required_files(options, ("vocab_file",), cls.__name__)))


def read_vocab(vocab_file: str) -> dict[str, int]:
    """Return {token: line number from 0} of a file with one token per line.  Raises DataError naming the line."""
    try:
        text = read_text(vocab_file, DataError, f"--vocab-file {vocab_file}")
        tokens = text.removesuffix("\n").split("\n")
    except UnicodeDecodeError as e:
        raise DataError(f"--vocab-file {vocab_file} is not UTF-8 text: {e}.") from None
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocab.setdefault(token.rstrip("\r"), number) != number:
            raise DataError(
                f"--vocab-file {vocab_file}, line {number + 1}: {token!r} is in line "
                f"{vocab[token] + 1} already, and a token has only one id."
            )
    if missing := [token for token in WORD_PIECE_TOKENS if token not in vocab]:
        raise DataError(
            f"--vocab-file {vocab_file} has no {', '.join(missing)}, which WordPiece needs: it must "
            "be a vocab.txt with one token per line."
        )
    return vocab
