"""Encoders of the tokenizers that are served by the `tokenizers` library, chosen by `--tokenizer-backend`:

    native       csrc/data/bpe.cpp, for byte-level BPE; about thirty times as fast as the library
    gigatoken    the package of that name, for much the same tokenizers, if it is installed
    tokenizers   the library itself, for all of them
    auto         native if it supports the tokenizer, else the library; the reason is logged once

All backends give the library's ids: the first texts are encoded by both and compared.

The native encoder supports plain merges and two patterns that cut text into pieces, that of GPT-2 and that of
GPT-4, Llama 3 and Qwen 2. `plan_native` reads the library's JSON description and gives the reason if anything
else is in it. Texts with an added token such as `<|endoftext|>` are encoded by the library.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...data.tokenizers.base import Arrays, Tokenizer, flat
from ...errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryModel

Describe = Callable[[], str]  # the text of a tokenizer.json
EncodeBatch = Callable[[Sequence[str]], list[list[int]]]
EncodeArrays = Callable[[Sequence[str]], Arrays]
logger = logging.getLogger(__name__)
CHECKED_BYTES = 1 << 16  # bytes of the first texts that are encoded twice, in 50 ms
ENCODING = "a text cannot be encoded"
OTHER, LETTER, NUMBER, SPACE = range(4)
LAST_ASSIGNED = 0x40000  # no code point from here on is a letter, a number or a space
# The newer pattern, and how many digits of a number stay together.
_NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
MOST_DIGITS = {_NEWER % "{1,3}": 3, _NEWER % "": 1}


@contextmanager
def library_panics(what: str) -> Iterator[None]:
    """Turn a panic of the library in the block into a DataError. A panic is no Exception, and its class has no
    name to import."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{what}: the tokenizers library failed: {error}. The file is damaged, or the text "
            "cannot be cut by its pattern."
        ) from None


class LibraryTokenizer(Tokenizer):
    """Base of the tokenizers over a `tokenizers.Tokenizer`. Special tokens are not added to the text.

    Raises ConfigError for a backend that is unknown, missing, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: LibraryModel, backend: str):
        if backend not in _MAKERS:
            raise ConfigError(
                f"--tokenizer-backend {backend}: use one of {', '.join(_MAKERS)}."
            )
        self._tokenizer = tokenizer
        self._backend_name = backend
        if backend != "auto":
            _ = self._backend

    @functools.cached_property
    def beginning(self) -> tuple[int, ...]:
        """Return the ids that the tokenizer's file puts in front of a text. `encode` leaves them out."""
        plain = self.encode("a")
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        for count in range(len(ids) - len(plain) + 1):
            if ids[count : count + len(plain)] == plain:
                return tuple(ids[:count])
        return ()

    def encode(self, text: str) -> list[int]:
        with library_panics(ENCODING):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the characters that each id stands for."""
        with library_panics(ENCODING):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, such as <|im_end|>."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with library_panics(ENCODING):
            found = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [encoding.ids for encoding in found]

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Return the ids of the texts back to back, and the number of ids of each, by the backend."""
        return self._backend(texts)

    @functools.cached_property
    def _backend(self) -> EncodeArrays:
        """Make the backend at its first use: training never encodes."""
        return _MAKERS[self._backend_name](self._tokenizer.to_str, self.encode_batch)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class CheckedBackend:
    """A fast backend. The ids of the first CHECKED_BYTES are compared with the library's."""

    def __init__(self, name: str, fast: EncodeArrays, library: EncodeBatch):
        self._name = name
        self._fast = fast
        self._library = library
        self._unchecked = CHECKED_BYTES

    def __call__(self, texts: Sequence[str]) -> Arrays:
        ids, lengths = self._fast(texts)
        if self._unchecked > 0:
            self._check(texts, ids, lengths)
        return ids, lengths

    def _check(
        self, texts: Sequence[str], ids: np.ndarray, lengths: np.ndarray
    ) -> None:
        start = 0
        for text, length in zip(texts, lengths.tolist()):
            mine = ids[start : start + length].tolist()
            start = start + length
            # The library takes 150 bytes for each byte of a text.
            if len(text) > self._unchecked:
                text = text[: self._unchecked]
                mine = self._fast([text])[0].tolist()
            theirs = self._library([text])[0]
            if mine != theirs:
                at = len(os.path.commonprefix([mine, theirs]))
                raise DataError(
                    f"--tokenizer-backend {self._name} gives other ids than the tokenizers library: from "
                    f"token {at} on {mine[at : at + 4]} instead of {theirs[at : at + 4]}, in a text that begins "
                    f"with {text[:40]!r}. Use --tokenizer-backend tokenizers, and please report it."
                )
            self._unchecked -= len(text)
            if self._unchecked <= 0:
                return


def _by_library(describe: Describe, library: EncodeBatch) -> EncodeArrays:
    return lambda texts: flat(library(texts))


def _native(
    describe: Describe, library: EncodeBatch, is_required: bool = True
) -> EncodeArrays:
    made = _native_or_reason(describe, library)
    if not isinstance(made, str):
        return made
    if is_required:
        raise ConfigError(
            f"--tokenizer-backend native does not support this tokenizer: {made}. Use auto or "
            "tokenizers."
        )
    logger.info(
        "the tokenizers library encodes the text, not the faster native encoder: %s",
        made,
    )
    return _by_library(describe, library)


def _native_or_reason(describe: Describe, library: EncodeBatch) -> CheckedBackend | str:
    """Return the native backend, or the reason why it cannot be used."""
    module = extension()
    if module is None:
        return "megatron_ds was installed without a C++17 compiler, so its faster encoder is missing"
    plan = plan_native(describe())
    if isinstance(plan, str):
        return plan
    encoder = module.Encoder(*plan)

    def encode(texts: Sequence[str]) -> Arrays:
        """Return the library encodes texts with an added token."""
        ids, lengths, left = encoder.encode(list(texts))
        if not left:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i, row in zip(left, library([texts[i] for i in left])):
            parts[i], lengths[i] = np.array(row, np.int32), len(row)
        return np.concatenate(parts), lengths

    return CheckedBackend("native", encode, library)


def _gigatoken(describe: Describe, library: EncodeBatch) -> EncodeArrays:
    try:
        package = importlib.import_module("gigatoken")
    except ImportError as e:
        raise ConfigError(
            f"--tokenizer-backend gigatoken needs the package gigatoken ({e}): pip install "
            "gigatoken, or use native, which needs no package."
        ) from None
    try:
        tokenizer = package.Tokenizer.from_json(describe())
    except Exception as e:  # gigatoken does not document its exceptions
        raise ConfigError(
            f"--tokenizer-backend gigatoken does not support this tokenizer: {e}. Use "
            "auto."
        ) from None
    return CheckedBackend(
        "gigatoken",
        lambda texts: flat(tokenizer.encode_batch_list(list(texts), parallel=False)),
        library,
    )


_MAKERS: dict[str, Callable[[Describe, EncodeBatch], EncodeArrays]] = {
    "auto": functools.partial(_native, is_required=False),
    "native": _native,
    "tokenizers": _by_library,
    "gigatoken": _gigatoken,
}
BACKENDS = tuple(_MAKERS)


@functools.cache
def extension() -> ModuleType | None:
    """Return the compiled encoder, or None where the package was installed without a compiler."""
    try:
        return importlib.import_module("megatron_ds._bpe")
    except ImportError:
        return None


@functools.cache
def byte_letters() -> dict[int, str]:
    """Return the letter that byte-level vocabularies write for each of the 256 bytes (Radford et al. 2019).

    Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the letters from U+0100
    on.
    """
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {
        b: chr(256 + i) for i, b in enumerate(hidden)
    }


class NativePlan(NamedTuple):
    """Arguments of the compiled encoder.

    merges       int32 [merges, 3]: left id, right id, merged id; the first learned first
    whole        tokens that equal pieces become at once, without merging
    specials     added tokens; texts with one are left to the library
    classes      `library_classes`
    newer        the newer pattern instead of GPT-2's
    most_digits  of a number, in the newer pattern
    """

    byte_ids: list[int]
    merges: np.ndarray
    whole: list[tuple[bytes, int]]
    specials: list[bytes]
    classes: bytes
    newer: bool
    most_digits: int


def plan_native(description: str) -> NativePlan | str:
    """Return the plan for the text of a `tokenizer.json`, or the reason why the tokenizer is not supported."""
    parts = json.loads(description)
    model = parts["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its model has {name}"
    if parts.get("normalizer"):
        return f"it normalizes text ({parts['normalizer'].get('type')})"
    pattern = _known_pattern(parts.get("pre_tokenizer") or {})
    if pattern is None:
        return "it cuts text in another way than GPT-2, GPT-4, Llama 3 and Qwen 2"
    # All bytes need a token, since merges begin with bytes.
    vocab = model["vocab"]
    letters = byte_letters()
    if missing := [b for b, letter in letters.items() if letter not in vocab]:
        return f"its vocabulary has no token for {len(missing)} of the 256 bytes"
    pairs = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]
    ]
    merges = np.array(
        [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs],
        np.int32,
    )
    return NativePlan(
        [vocab[letters[b]] for b in range(256)],
        merges.reshape(-1, 3),
        _as_bytes(vocab) if model.get("ignore_merges") else [],
        [token["content"].encode() for token in parts.get("added_tokens") or []],
        library_classes(),
        *pattern,
    )


def _known_pattern(pre_tokenizer: dict) -> tuple[bool, int] | None:
    """Return (whether it is the newer pattern, digits of a number together); None for an unknown pattern."""
    if pre_tokenizer.get("type") == "Sequence":
        split, *rest = pre_tokenizer["pretokenizers"]
        pattern = split.get("pattern", {}).get("Regex")
        known = (
            split["type"] == "Split"
            and split["behavior"] == "Isolated"
            and not split["invert"]
            and pattern in MOST_DIGITS
            and len(rest) == 1
            and _is_byte_level(rest[0])
            and not rest[0]["use_regex"]
        )
        return (True, MOST_DIGITS[pattern]) if known else None
    return (
        (False, 0)
        if _is_byte_level(pre_tokenizer) and pre_tokenizer.get("use_regex", True)
        else None
    )


def _is_byte_level(part: dict) -> bool:
    return part.get("type") == "ByteLevel" and not part["add_prefix_space"]


def _as_bytes(vocab: dict[str, int]) -> list[tuple[bytes, int]]:
    byte_of = {letter: b for b, letter in byte_letters().items()}
    return [
        (bytes(byte_of[c] for c in token), i)
        for token, i in vocab.items()
        if all(c in byte_of for c in token)
    ]


@functools.cache
def library_classes() -> bytes:
    """Return the class of each code point in the `tokenizers` library, whose Unicode version differs from Python's.

    The library cuts the text of all characters, in order, into runs of one class; the class of a run is found
    from its first character.
    """
    from tokenizers import pre_tokenizers

    cut = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    codes = np.array(
        [c for c in range(0x80, LAST_ASSIGNED) if not 0xD800 <= c < 0xE000]
    )
    text = "".join(map(chr, codes))
    classes = np.zeros(0x110000, np.uint8)
    for c in range(0x80):
        classes[c] = _class_of(chr(c), cut)
    for _, (start, stop) in cut(text):
        classes[codes[start:stop]] = _class_of(text[start], cut)
    return classes.tobytes()


def _class_of(character: str, cut: Callable) -> int:
    """Return the class of a character. The library cuts a text between classes: a letter is not cut from letters,
    a number from numbers, nor a sign from signs; white space is cut from nothing."""
    alike = {LETTER: "a", NUMBER: "1", OTHER: "!"}
    return next(
        (kind for kind, c in alike.items() if len(cut(f"{c}{character}{c}")) == 1),
        SPACE,
    )
