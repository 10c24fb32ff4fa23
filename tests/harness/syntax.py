"""Syntax trees of source files, which tests of the code itself walk many times."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, parsed once for all tests of a process."""
    return ast.parse(path.read_text(encoding="utf-8"))
