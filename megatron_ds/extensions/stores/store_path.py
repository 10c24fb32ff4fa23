"""`UPath`: a place in a store, which has the methods of `pathlib.Path` without being one.

Functions of `folder.py` take either under the name `Path`; so a type checker sees a subclass of it here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class UPath(Path):
        """fs: the store, of fsspec; path: the name in it."""

        fs: Any
        path: str

        def __new__(cls, *parts: str, **options: Any) -> "UPath": ...

else:
    from upath import UPath

__all__ = ["UPath"]
