"""Run an action that may fail on some ranks: all ranks continue, or all raise the same error.

Without it, a file that one machine lacks would leave the other ranks waiting in their next collective.
"""

from collections.abc import Callable
from typing import TypeVar

from ..errors import MegatronDSError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group

T = TypeVar("T")


def together(world: Group, action: Callable[[], T], only: int | None = None) -> T:
    """`action()`, or on every rank the first error that any rank's action raised, naming the ranks when not all did.

    only: this rank acts alone, and all get its (picklable) result.
    Collective over `world`: an all-gather of the error texts. `action` must not communicate.
    """
    result = error = None
    try:
        result = action() if only is None or only == world.rank else None
    except (MegatronDSError, OSError) as problem:
        error = problem
    kinds = all_gather_object((type(error), str(error)) if error else None, world)
    failed = [rank for rank, kind in enumerate(kinds) if kind]
    if not failed:
        return result if only is None else all_gather_object(result, world)[only]
    kind, text = kinds[failed[0]]
    if only is None and len(failed) < len(kinds):
        text = f"on rank(s) {', '.join(map(str, failed[:8]))} of {len(kinds)}: {text}"
    shared = (kind if issubclass(kind, MegatronDSError) else MegatronDSError)(text)
    shared.on_all_ranks = True        # so that one rank prints it for all
    raise shared from error
