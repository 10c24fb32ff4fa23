"""What turns texts into ids for the tokenizers that read files of the `tokenizers` library, by `--tokenizer-backend`:

    native       csrc/bpe.cpp, for byte-level BPE; some thirty times as fast as the library
    gigatoken    the package of that name, for much the same tokenizers, if it is installed
    tokenizers   the library itself, for everything
    auto         native where it can be, else the library; which, and why, is said once in the log

The ids are those of the library for every backend: the first texts are encoded by both and compared.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from ...errors import ConfigError, DataError
from .base import Arrays, flat
from .native_bpe import NativeBPE, plan_native

logger = logging.getLogger(__name__)
CHECKED_BYTES = 1 << 16                                     # of the first texts are encoded twice; a twentieth of a second


class LibraryBackend:
    """Ids by a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return flat(self.encode_batch(texts))


class GigatokenBackend:
    def __init__(self, description: str, package: ModuleType):
        self._tokenizer = package.Tokenizer.from_json(description)

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return flat(self._tokenizer.encode_batch_list(list(texts), parallel=False))


class CheckedBackend:
    """A fast backend whose first ids are compared with the library's."""

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
            if len(text) > self._unchecked:                 # the library takes 150 bytes for each byte of a text
                text = text[:self._unchecked]
                mine = self._fast.encode_arrays([text])[0].tolist()
            theirs = self._library.encode_batch([text])[0]
            if mine != theirs:
                at = next((i for i, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), min(len(mine), len(theirs)))
                raise DataError(f"--tokenizer-backend {self._name} gives other ids than the tokenizers library: from token "
                                f"{at} on {mine[at:at + 4]} instead of {theirs[at:at + 4]}, in a text that begins with "
                                f"{text[:40]!r}. Use --tokenizer-backend tokenizers, and please report it.")
            self._unchecked -= len(text)
            if self._unchecked <= 0:
                return


class Backend:
    """The backend of that name for a `tokenizers.Tokenizer`, made when it is first used: training never encodes.

    Raises ConfigError at once for a name that is unknown, or whose backend is not there or cannot serve the tokenizer.
    """

    def __init__(self, tokenizer, name: str):
        if name not in _MAKERS:
            raise ConfigError(f"--tokenizer-backend {name}: use one of {', '.join(_MAKERS)}.")
        self._tokenizer, self._name = tokenizer, name
        if name != "auto":
            _ = self._made

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        return self._made.encode_arrays(texts)

    @functools.cached_property
    def _made(self) -> LibraryBackend | CheckedBackend:
        return _MAKERS[self._name](LibraryBackend(self._tokenizer), self._tokenizer.to_str)


def _auto(library: LibraryBackend, describe: Callable[[], str]) -> LibraryBackend | CheckedBackend:
    made = _native_or_why_not(library, describe)
    if isinstance(made, str):
        logger.info("text is encoded by the tokenizers library: %s", made)
        return library
    return made


def _native(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend:
    made = _native_or_why_not(library, describe)
    if isinstance(made, str):
        raise ConfigError(f"--tokenizer-backend native does not support this tokenizer: {made}. Use auto or tokenizers.")
    return made


def _native_or_why_not(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend | str:
    if extension() is None:
        return "megatron_ds was installed without a C++17 compiler, so its faster encoder is missing"
    plan = plan_native(describe())
    return plan if isinstance(plan, str) else CheckedBackend(
        "native", NativeBPE(plan, library.encode_batch, extension().Encoder), library)


def _gigatoken(library: LibraryBackend, describe: Callable[[], str]) -> CheckedBackend:
    try:
        package = importlib.import_module("gigatoken")
    except ImportError as e:
        raise ConfigError(f"--tokenizer-backend gigatoken needs the package gigatoken ({e}): pip install gigatoken, or use "
                          "native, which needs no package.") from None
    try:
        return CheckedBackend("gigatoken", GigatokenBackend(describe(), package), library)
    except Exception as e:                                  # what a tokenizer it does not know raises, it does not say
        raise ConfigError(f"--tokenizer-backend gigatoken does not support this tokenizer: {e}. Use auto.") from None


_MAKERS = {"auto": _auto, "native": _native, "tokenizers": lambda library, describe: library, "gigatoken": _gigatoken}
BACKENDS = tuple(_MAKERS)


@functools.cache
def extension() -> ModuleType | None:
    try:
        return importlib.import_module("megatron_ds._bpe")
    except ImportError:
        return None


