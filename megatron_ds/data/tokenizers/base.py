"""`Tokenizer`, the interface of all tokenizers; the table of them; and the simplest one, `NullTokenizer`."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import ConfigError, DataError
from ...registry import Registry

# Ids of several texts back to back, and the length of each.
Arrays = tuple[np.ndarray, np.ndarray]


class Tokenizer(Protocol):
    """Text ↔ ids.

    vocab_size   ids are in [0, vocab_size), special tokens included; without padding
    eod          id that ends a document
    fingerprint  equal for two tokenizers exactly when they have the same type and vocabulary

    A tokenizer that encodes many texts without a Python list of each also has `encode_arrays(texts) ->
    Arrays`, which `arrays_of` uses.
    """

    vocab_size: int
    eod: int
    fingerprint: str

    @classmethod
    def from_options(cls, options: "TokenizerOptions") -> "Tokenizer":
        """Make it from its flags. Raises ConfigError for a missing flag, DataError for a damaged file."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end of document."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""


@dataclass(frozen=True)
class TokenizerOptions:
    """The values of the tokenizer flags. Each tokenizer reads those that it needs."""

    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    backend: str = "auto"


TOKENIZERS: Registry[type[Tokenizer]] = Registry("tokenizer")


def arrays_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Arrays:
    """Return the ids of the texts back to back, and the number of ids of each, int64."""
    fast = getattr(tokenizer, "encode_arrays", None)
    return fast(texts) if fast else flat(tokenizer.encode_batch(texts))


def flat(rows: Sequence[Sequence[int]]) -> Arrays:
    """Return the rows back to back, int32, and their lengths, int64."""
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.fromiter(
        (i for row in rows for i in row), np.int32, int(lengths.sum())
    ), lengths


def required_files(
    options: TokenizerOptions,
    fields: Sequence[str],
    kind: str,
    *,
    folder_ok: bool = False,
) -> list[str]:
    """Return the paths in these fields. Raises one ConfigError naming all flags that are missing or name no file."""
    flag = lambda field: "--" + field.replace("_", "-")
    wrong = []
    missing = [flag(field) for field in fields if not getattr(options, field)]
    if missing:
        wrong.append(
            f"{kind} needs {' and '.join(missing)}. megatron-ds tokenizer makes such files from "
            "your text."
        )
    for field in fields:
        path = getattr(options, field)
        if path and not (os.path.isfile(path) or folder_ok and os.path.isdir(path)):
            what = "file or folder" if folder_ok else "file"
            wrong.append(
                f"{flag(field)} {path}: there is no such {what}, and {kind} needs it."
            )
    if wrong:
        raise ConfigError(" ".join(wrong))
    return [getattr(options, field) for field in fields]


def fingerprint_of(kind: str, *parts: bytes) -> str:
    """Return `kind:hash` of the bytes that define a vocabulary."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()[:16]}"


@TOKENIZERS.register("NullTokenizer")
class NullTokenizer(Tokenizer):
    """Text that is decimal ids between spaces, for mock data and tests.

    Ids 0 … N − 1 for `--vocab-size N`; the end of a document is one more id, N, as in Megatron.
    """

    def __init__(self, num_ids: int):
        self.eod = num_ids
        self.vocab_size = num_ids + 1
        self.fingerprint = f"NullTokenizer:{num_ids}"

    @classmethod
    def from_options(cls, options: TokenizerOptions) -> "NullTokenizer":
        if not options.vocab_size:
            raise ConfigError(
                "NullTokenizer needs --vocab-size, the number of different ids in the data."
            )
        return cls(options.vocab_size)

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as e:
            raise DataError(
                f"NullTokenizer reads decimal ids separated by spaces: {e}. For other text, give the tokenizer of the "
                "model with --tokenizer-type and its files."
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(
                f"the text contains ids from {min(ids)} to {max(ids)}, but NullTokenizer with "
                f"--vocab-size {self.eod} allows 0 to {self.eod}, the last for the end of a "
                "document. Use a larger --vocab-size, or correct the text."
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
