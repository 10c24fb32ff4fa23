"""Plain text from texts whose tokens are separated by spaces, as data sets of language modelling are published.

A perplexity per word is of the words in the file, the model reads the plain text. Rules are those of
Megatron's zero-shot tasks, so that figures can be compared, and are applied one after the other.
"""

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]

DEGREE = "\N{DEGREE SIGN}"
# (what is replaced, by what), as text
WIKITEXT_BEFORE = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
# (pattern, replacement): blanks within a pair of brackets or quotation marks
WIKITEXT_PAIRS = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
WIKITEXT_AFTER = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (f" {DEGREE} ", DEGREE),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PTB = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """WikiText: separated punctuation and numbers, headings between equals signs."""
    text = _replaced(text, WIKITEXT_BEFORE)
    for pattern, replacement in WIKITEXT_PAIRS:
        text = re.sub(pattern, replacement, text)
    return _replaced(text, WIKITEXT_AFTER)


def penn_treebank(text: str) -> str:
    """Penn Treebank: separated contractions, N for each number."""
    return _replaced(text, PTB)


def plain(text: str) -> str:
    """Text that has no separated tokens, such as that of LAMBADA."""
    return text


DETOKENIZERS: dict[str, Detokenizer] = {
    "wikitext": wikitext,
    "ptb": penn_treebank,
    "none": plain,
}


def _replaced(text: str, rules: tuple[tuple[str, str], ...]) -> str:
    for old, new in rules:
        text = text.replace(old, new)
    return text
