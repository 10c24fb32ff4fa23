"""What every tokenizer is, and the table of them."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import ConfigError
from ...registry import Registry

Arrays = tuple[np.ndarray, np.ndarray]                      # ids of several texts back to back; how many each of them has

class Tokenizer(Protocol):
    """Text ↔ ids.

    vocab_size   ids are in [0, vocab_size), special ones included; not padded
    eod          id that ends a document
    fingerprint  the same for two tokenizers exactly when they are of the same kind with the same vocabulary

    One that has a way to encode many texts without a Python list of each also has `encode_arrays(texts) -> Arrays`;
    `arrays_of` uses it.
    """

    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class TokenizerOptions:
    """The values of the tokenizer flags; a tokenizer says which of them it needs."""

    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    backend: str = "auto"


TOKENIZERS: Registry[type[Tokenizer]] = Registry("tokenizer")       # each has a `from_options(TokenizerOptions)`


def arrays_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Arrays:
    """Ids of the texts back to back, and the number of ids of each, int64."""
    fast = getattr(tokenizer, "encode_arrays", None)
    return fast(texts) if fast else flat(tokenizer.encode_batch(texts))


def flat(rows: Sequence[Sequence[int]]) -> Arrays:
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.fromiter((i for row in rows for i in row), np.int32, int(lengths.sum())), lengths


def required_file(options: TokenizerOptions, field: str, kind: str, *, folder_ok: bool = False) -> str:
    """The path in `options.field`. Raises ConfigError naming the flag when it is not given or not there."""
    return required_files(options, (field,), kind, folder_ok=folder_ok)[0]


def required_files(options: TokenizerOptions, fields: Sequence[str], kind: str, *, folder_ok: bool = False) -> list[str]:
    """Several of them; all problems are in one error."""
    wrong = []
    missing = [_flag(field) for field in fields if not getattr(options, field)]
    if missing:
        wrong.append(f"{kind} needs {' and '.join(missing)}. tools/train_tokenizer.py makes such files from text of your own.")
    for field in fields:
        path = getattr(options, field)
        if path and not (os.path.isfile(path) or folder_ok and os.path.isdir(path)):
            what = "file or folder" if folder_ok else "file"
            wrong.append(f"{_flag(field)} {path}: there is no such {what}, and {kind} needs it.")
    if wrong:
        raise ConfigError(" ".join(wrong))
    return [getattr(options, field) for field in fields]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def fingerprint_of(kind: str, *parts: bytes) -> str:
    """`kind:hash` of the bytes that define a vocabulary."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{kind}:{digest.hexdigest()[:16]}"
