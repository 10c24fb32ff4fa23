"""The compiled byte-level BPE (`csrc/bpe.cpp`) for tokenizers of the `tokenizers` library whose every part it knows.

It knows two ways of cutting text, GPT-2's and that of GPT-4, Llama 3 and Qwen 2, and plain joints. `plan_native` reads the
library's own description and says what stands in the way of anything else. Texts in which an added token such as
`<|endoftext|>` occurs are left to the library, whose rules for those are many.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .byte_letters import byte_letters

OTHER, LETTER, NUMBER, SPACE = range(4)
LAST_ASSIGNED = 0x40000                                     # beyond are no letters, numbers or blanks

# The newer way to cut: its pattern, and how many digits of a number stay together.
_NEWER = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MOST_DIGITS = {_NEWER % "{1,3}": 3, _NEWER % "": 1}


@dataclass(frozen=True)
class NativePlan:
    """What the compiled encoder is made from. joints: int32 [merges, 3], left id, right id, joint id, first learned first."""

    byte_ids: list[int]
    joints: np.ndarray
    whole: list[tuple[bytes, int]]                          # tokens that pieces become at once, without joining
    specials: list[bytes]
    newer: bool
    most_digits: int


class NativeBPE:
    """Encodes many texts at once; `library` encodes those that hold an added token."""

    def __init__(self, plan: NativePlan, library: Callable[[Sequence[str]], list[list[int]]], encoder: type):
        self._library = library
        self._encoder = encoder(byte_ids=plan.byte_ids, joints=plan.joints, whole=plan.whole, specials=plan.specials,
                                classes=library_classes(), newer=plan.newer, most_digits=plan.most_digits)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths, left = self._encoder.encode(list(texts))
        if not left:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i, row in zip(left, self._library([texts[i] for i in left])):
            parts[i], lengths[i] = np.array(row, np.int32), len(row)
        return np.concatenate(parts), lengths


def plan_native(description: str) -> NativePlan | str:
    """The plan for a `tokenizer.json`, or what of it is not known here, in words."""
    parts = json.loads(description)
    model = parts["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"its model has {name}"
    if parts.get("normalizer"):
        return f"it normalizes text ({parts['normalizer'].get('type')})"
    cut = _way_to_cut(parts.get("pre_tokenizer") or {})
    if cut is None:
        return "it cuts text in another way than GPT-2, GPT-4, Llama 3 and Qwen 2"
    vocab, letters = model["vocab"], byte_letters()
    if missing := [b for b, letter in letters.items() if letter not in vocab]:
        return f"its vocabulary has no token for {len(missing)} of the 256 bytes"
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    joints = np.array([(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs], np.int32)
    return NativePlan([vocab[letters[b]] for b in range(256)], joints.reshape(-1, 3),
                      _as_bytes(vocab) if model.get("ignore_merges") else [],
                      [token["content"].encode() for token in parts.get("added_tokens") or []], *cut)


def _way_to_cut(pre_tokenizer: dict) -> tuple[bool, int] | None:
    """(the newer way, digits of a number together); None for a way that is not known."""
    if pre_tokenizer.get("type") == "Sequence":
        split, *rest = pre_tokenizer["pretokenizers"]
        pattern = split.get("pattern", {}).get("Regex")
        known = (split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
                 and pattern in MOST_DIGITS and len(rest) == 1 and _byte_level(rest[0]) and not rest[0]["use_regex"])
        return (True, MOST_DIGITS[pattern]) if known else None
    return (False, 0) if _byte_level(pre_tokenizer) and pre_tokenizer.get("use_regex", True) else None


def _byte_level(part: dict) -> bool:
    return part.get("type") == "ByteLevel" and not part["add_prefix_space"]


def _as_bytes(vocab: dict[str, int]) -> list[tuple[bytes, int]]:
    byte_of = {letter: b for b, letter in byte_letters().items()}
    return [(bytes(byte_of[c] for c in token), i) for token, i in vocab.items() if all(c in byte_of for c in token)]


@lru_cache(maxsize=1)
def library_classes() -> bytes:
    """The class of each code point as the `tokenizers` library sees it: its tables are of another Unicode than Python's.

    The library cuts all characters, in order, into runs of a class; one character of a run tells the class.
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
    """A letter stays with letters, a number with numbers, a sign with signs; white space with none."""
    alike = {LETTER: "a", NUMBER: "1", OTHER: "!"}
    return next((kind for kind, c in alike.items() if len(cut(f"{c}{character}{c}")) == 1), SPACE)
