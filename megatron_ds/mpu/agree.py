"""Run an action that may fail on some ranks: all ranks continue, or all raise the same error.

Without it, a file that one machine lacks would leave the other ranks waiting in their next collective.
"""

from collections.abc import Callable
from typing import TypeVar

from ..errors import MegatronDSError
from .collectives import all_gather_object
from .group import Group

T = TypeVar("T")


def together(world: Group, action: Callable[[], T], only: int | None = None) -> T:
    """`action()`, or on every rank the first error that any rank's action raised, naming the ranks when not all did.

    only: this rank acts alone, and all get its (picklable) result.
    Collective over `world`: an all-gather of the error texts. `action` must not communicate.
    """
    result = error = None
    try:
        result = action() if only is None or only == world.rank else None
    except Exception as problem:      # of any kind: the other ranks wait in the all-gather below
        error = problem
    kinds = all_gather_object(_kind_and_text(error), world)
    failed = [rank for rank, kind in enumerate(kinds) if kind]
    if not failed:
        return result if only is None else all_gather_object(result, world)[only]
    kind, text = kinds[failed[0]]
    if only is None and len(failed) < len(kinds):
        text = f"on rank(s) {', '.join(map(str, failed[:8]))} of {len(kinds)}: {text}"
    if error is not None and not isinstance(error, (MegatronDSError, OSError)):
        raise error                   # a defect, not the user's: this rank shows its traceback
    shared = kind(text)
    shared.on_all_ranks = True        # so that one rank prints it for all
    raise shared from error


def _kind_and_text(error: Exception | None) -> tuple[type[MegatronDSError], str] | None:
    """What the other ranks raise; of an error that is none of this package's, its type is part of the text."""
    if error is None:
        return None
    if isinstance(error, MegatronDSError):
        return type(error), str(error)
    return MegatronDSError, str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
