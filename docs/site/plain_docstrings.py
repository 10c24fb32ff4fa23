"""An extension of Sphinx for docstrings in plain text: sentences, code between single backticks, lists, and tables of
aligned columns.

Lines that are indented, or whose columns are aligned by blanks, keep their layout. In the others only backticks
and lists have a meaning.
"""

import re
from itertools import groupby

ITEM = re.compile(r"[*-] |\d+\. ")
ALIGNED = re.compile(r"\S {3,}\S")
CODE = re.compile(r"`([^`]+)`(?=(\w?))")
# The mark of an item, or a character that must not have its meaning: a word that ends with _ would be a link.
SPECIAL = re.compile(r"^\* |[\\*|`]|_(?!\w)", re.MULTILINE)

TEXT = "text"
LIST = "list"
LAYOUT = "layout"


def kinds(lines: list[str]) -> list[str]:
    """Return what each line belongs to. A blank line belongs to what is before it."""
    found = [TEXT]
    for line in lines:
        before = found[-1]
        if not line.strip():
            found.append(before)
        elif ITEM.match(line):
            found.append(LIST)
        elif line[0] == " " and before != TEXT:
            # The continuation of an item, or more of a table.
            found.append(before)
        elif line[0] == " " or ALIGNED.search(line):
            found.append(LAYOUT)
        else:
            found.append(TEXT)
    return found[1:]


def escaped(found: re.Match[str]) -> str:
    """Return a character without its meaning; the mark of an item as it is."""
    return found[0] if found[0] == "* " else f"\\{found[0]}"


def marked(text: str) -> str:
    """Return lines in which only code and the marks of items have a meaning."""
    parts = []
    at = 0
    for code in CODE.finditer(text):
        parts += [SPECIAL.sub(escaped, text[at : code.start()]), f"``{code[1]}``"]
        # A letter directly behind code, as in a plural, needs a mark between them.
        parts.append("\\ " if code[2] else "")
        at = code.end()
    parts.append(SPECIAL.sub(escaped, text[at:]))
    return "".join(parts)


def restructured(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    result = []
    for kind, group in groupby(zip(kinds(lines), lines), key=lambda pair: pair[0]):
        block = [line for _, line in group]
        if kind == LAYOUT:
            result += ["", "::", "", *(f"    {line}" for line in block), ""]
        else:
            result += ["", *marked("\n".join(block)).split("\n")]
    return result


def replace(app, what, name, obj, options, lines: list[str]) -> None:
    """Convert a docstring in place."""
    lines[:] = restructured(lines)


def setup(app) -> dict[str, bool]:
    """Register the extension."""
    app.connect("autodoc-process-docstring", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
