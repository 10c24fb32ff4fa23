"""Encoders of the tokenizers that are served by the `tokenizers` library, chosen by `--tokenizer-backend`:

    native       csrc/bpe.cpp, for byte-level BPE; about thirty times as fast as the library
    gigatoken    the package of that name, for much the same tokenizers, if it is installed
    tokenizers   the library itself, for all of them
    auto         native if it supports the tokenizer, else the library; the reason is logged once

All backends give the library's ids: the first texts are encoded by both and compared.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError, DataError
from .base import Arrays, flat
from .native_bpe import NativeBPE, plan_native

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryModel

logger = logging.getLogger(__name__)
CHECKED_BYTES = 1 << 16                                     # of the first texts are encoded twice, in 50 ms


class LibraryTokenizer:
    """Base of the tokenizers over a `tokenizers.Tokenizer`. Special tokens are not added to the text."""

    def __init__(self, tokenizer: "LibraryModel", backend: str):
        self._tokenizer = tokenizer
        self._backend = Backend(tokenizer, backend)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return LibraryBackend(self._tokenizer).encode_batch(texts)

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return self._backend.encode_arrays(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class LibraryBackend:
    """Ids by the library."""

    def __init__(self, tokenizer: "LibraryModel"):
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return flat(self.encode_batch(texts))


class GigatokenBackend:
    """Ids by the package gigatoken, from the JSON description of a tokenizer."""

    def __init__(self, description: str, package: ModuleType):
        self._tokenizer = package.Tokenizer.from_json(description)

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return flat(self._tokenizer.encode_batch_list(list(texts), parallel=False))


class CheckedBackend:
    """A fast backend. The ids of the first CHECKED_BYTES are compared with the library's."""

    def __init__(self, name: str, fast: NativeBPE | GigatokenBackend, library: LibraryBackend):
        self._name, self._fast, self._library, self._unchecked = name, fast, library, CHECKED_BYTES

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        ids, lengths = self._fast.encode_arrays(texts)
        if self._unchecked > 0:
            self._check(texts, ids, lengths)
        return ids, lengths

    def _check(self, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray) -> None:
        start = 0
        for text, length in zip(texts, lengths.tolist()):
            mine, start = ids[start:start + length].tolist(), start + length
            if len(text) > self._unchecked:              # the library takes 150 bytes for each byte of a text
                text = text[:self._unchecked]
                mine = self._fast.encode_arrays([text])[0].tolist()
            theirs = self._library.encode_batch([text])[0]
            if mine != theirs:
                at = next((i for i, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]),
                          min(len(mine), len(theirs)))
                raise DataError(
                    f"--tokenizer-backend {self._name} gives other ids than the tokenizers library: from "
                    f"token {at} on {mine[at:at + 4]} instead of {theirs[at:at + 4]}, in a text that begins "
                    f"with {text[:40]!r}. Use --tokenizer-backend tokenizers, and please report it.")
            self._unchecked -= len(text)
            if self._unchecked <= 0:
                return


class Backend:
    """A backend by name, made when it is first used: training never encodes.

    Raises ConfigError at once for an unknown name, and for a backend that is missing or does not support the
    tokenizer.
    """

    def __init__(self, tokenizer: "LibraryModel", name: str):
        if name not in _MAKERS:
            raise ConfigError(f"--tokenizer-backend {name}: use one of {', '.join(_MAKERS)}.")
        self._tokenizer, self._name = tokenizer, name
        if name != "auto":
            _ = self._made

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Ids of the texts back to back, and the number of ids of each."""
        return self._made.encode_arrays(texts)

    @functools.cached_property
    def _made(self) -> LibraryBackend | CheckedBackend:
        return _MAKERS[self._name](LibraryBackend(self._tokenizer), self._tokenizer.to_str)


def _auto(library: LibraryBackend, describe: Callable[[], str]) -> LibraryBackend | CheckedBackend:
    made = _native_or_reason(library, describe)
    if isinstance(made, str):
        logger.info("text is encoded by the tokenizers library: %s", made)
        return library
    return made


def _native(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend:
    made = _native_or_reason(library, describe)
    if isinstance(made, str):
        raise ConfigError(f"--tokenizer-backend native does not support this tokenizer: {made}. Use auto or "
                          "tokenizers.")
    return made


def _native_or_reason(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend | str:
    """The native backend, or the reason why it cannot be used."""
    if extension() is None:
        return "megatron_ds was installed without a C++17 compiler, so its faster encoder is missing"
    plan = plan_native(describe())
    return plan if isinstance(plan, str) else CheckedBackend(
        "native", NativeBPE(plan, library.encode_batch, extension().Encoder), library)


def _gigatoken(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend:
    try:
        package = importlib.import_module("gigatoken")
    except ImportError as e:
        raise ConfigError(f"--tokenizer-backend gigatoken needs the package gigatoken ({e}): pip install "
                          "gigatoken, or use native, which needs no package.") from None
    try:
        return CheckedBackend("gigatoken", GigatokenBackend(describe(), package), library)
    except Exception as e:                                  # gigatoken does not document its exceptions
        raise ConfigError(f"--tokenizer-backend gigatoken does not support this tokenizer: {e}. Use "
                          "auto.") from None


_MAKERS = {"auto": _auto, "native": _native, "tokenizers": lambda library, describe: library,
           "gigatoken": _gigatoken}
BACKENDS = tuple(_MAKERS)


@functools.cache
def extension() -> ModuleType | None:
    """The compiled encoder, or None where the package was installed without a compiler."""
    try:
        return importlib.import_module("megatron_ds._bpe")
    except ImportError:
        return None
