"""The compiled byte-level BPE (`csrc/bpe.cpp`), for those tokenizers of the library that it supports.

It supports two patterns that cut text into pieces, that of GPT-2 and that of GPT-4, Llama 3 and Qwen 2, and
plain merges. `plan_native` reads the library's JSON description and gives the reason if anything else is in
it. Texts with an added token such as `<|endoftext|>` are encoded by the library, which has many rules for
those.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

OTHER, LETTER, NUMBER, SPACE = range(4)
LAST_ASSIGNED = 0x40000                                     # no letters, numbers or spaces from here on

# The newer pattern, and how many digits of a number stay together.
_NEWER = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
MOST_DIGITS = {_NEWER % "{1,3}": 3, _NEWER % "": 1}


@lru_cache(maxsize=1)
def byte_letters() -> dict[int, str]:
    """The letter that byte-level vocabularies write for each of the 256 bytes (Radford et al. 2019).

    Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the letters from U+0100
    on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


@dataclass(frozen=True)
class NativePlan:
    """Arguments of the compiled encoder.

    merges       int32 [merges, 3]: left id, right id, merged id; the first learned first
    whole        tokens that equal pieces become at once, without merging
    specials     added tokens; texts with one are left to the library
    newer        the newer pattern instead of GPT-2's
    most_digits  of a number, in the newer pattern
    """

    byte_ids: list[int]
    merges: np.ndarray
    whole: list[tuple[bytes, int]]
    specials: list[bytes]
    newer: bool
    most_digits: int


class NativeBPE:
    """Encodes many texts at once; `library` encodes those with an added token."""

    def __init__(self, plan: NativePlan, library: Callable[[Sequence[str]], list[list[int]]], encoder: type):
        self._library = library
        self._encoder = encoder(plan.byte_ids, plan.merges, plan.whole, plan.specials, library_classes(),
                                plan.newer,
                                plan.most_digits)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts back to back, and the number of ids of each."""
        ids, lengths, left = self._encoder.encode(list(texts))
        if not left:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i, row in zip(left, self._library([texts[i] for i in left])):
            parts[i], lengths[i] = np.array(row, np.int32), len(row)
        return np.concatenate(parts), lengths


def plan_native(description: str) -> NativePlan | str:
    """The plan for the text of a `tokenizer.json`, or the reason why the tokenizer is not supported."""
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
    vocab, letters = model["vocab"], byte_letters()
    if missing := [b for b, letter in letters.items() if letter not in vocab]:
        return f"its vocabulary has no token for {len(missing)} of the 256 bytes"
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = np.array([(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs], np.int32)
    return NativePlan([vocab[letters[b]] for b in range(256)], merges.reshape(-1, 3),
                      _as_bytes(vocab) if model.get("ignore_merges") else [],
                      [token["content"].encode() for token in parts.get("added_tokens") or []], *pattern)


def _known_pattern(pre_tokenizer: dict) -> tuple[bool, int] | None:
    """(whether it is the newer pattern, digits of a number together); None for an unknown pattern."""
    if pre_tokenizer.get("type") == "Sequence":
        split, *rest = pre_tokenizer["pretokenizers"]
        pattern = split.get("pattern", {}).get("Regex")
        known = (split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
                 and pattern in MOST_DIGITS and len(rest) == 1 and _is_byte_level(rest[0])
                 and not rest[0]["use_regex"])
        return (True, MOST_DIGITS[pattern]) if known else None
    return (False, 0) if _is_byte_level(pre_tokenizer) and pre_tokenizer.get("use_regex", True) else None


def _is_byte_level(part: dict) -> bool:
    return part.get("type") == "ByteLevel" and not part["add_prefix_space"]


def _as_bytes(vocab: dict[str, int]) -> list[tuple[bytes, int]]:
    byte_of = {letter: b for b, letter in byte_letters().items()}
    return [(bytes(byte_of[c] for c in token), i) for token, i in vocab.items()
            if all(c in byte_of for c in token)]


@lru_cache(maxsize=1)
def library_classes() -> bytes:
    """The class of each code point in the `tokenizers` library, whose Unicode version differs from Python's.

    The library cuts the text of all characters, in order, into runs of one class; the class of a run is found
    from its first character.
    """
    from tokenizers import pre_tokenizers
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    codes = np.array([c for c in range(0x80, LAST_ASSIGNED) if not 0xD800 <= c < 0xE000])
    text = "".join(map(chr, codes))
    classes = np.zeros(0x110000, np.uint8)
    for c in range(0x80):
        classes[c] = _class_of(chr(c), cut)
    for _, (start, stop) in cut(text):
        classes[codes[start:stop]] = _class_of(text[start], cut)
    return classes.tobytes()


def _class_of(character: str, cut: Callable) -> int:
    """A letter is not cut from letters, a number from numbers, a sign from signs; white space from none."""
    alike = {LETTER: "a", NUMBER: "1", OTHER: "!"}
    return next((kind for kind, c in alike.items() if len(cut(f"{c}{character}{c}")) == 1), SPACE)
