"""`mark_compilations`: while torch compiles, the phase of this rank is COMPILING, in which it may take long.

A compilation for another length of sequences takes a minute in the middle of a training, which is no hang.
"""

from functools import lru_cache
from typing import Any

from ....host import places


@lru_cache
def mark_compilations() -> None:
    """From now on each compilation is marked, if this process is watched. Compilations may be nested: torch calls
    once for the outer one."""
    watched = places.writer()
    if watched is None:
        return
    # Imported here: it takes a while, and torch needs it to compile anyway.
    from torch._dynamo.callback import callback_handler

    before: list[str] = []

    def begin(*_: Any) -> None:
        before.append(watched.phase(places.COMPILING))

    def end(*_: Any) -> None:
        if before:
            watched.phase(before.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
