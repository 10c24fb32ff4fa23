"""Acting on all ranks, or on none: an error of one rank becomes the same `CheckpointError` on every rank.

Without it, one full disk would leave the others waiting in the next collective until the timeout.
"""

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group

NAMED_RANKS = 3       # how many ranks' errors a message has; more would bury the first


def together(world: Group, doing: str, action: Callable[[], Any], only: int | None = None) -> list:
    """Run `action` on every rank of `world`, or on rank `only`; what each returned, in rank order.

    Collective: one all-gather of the picklable results. `action` must not communicate.
    """
    result = error = None
    if only is None or only == world.rank:
        try:
            result = action()
        except Exception as problem:    # of any kind: the other ranks wait in the all-gather below
            error = problem
    answers = all_gather_object((result, _words(error)), world)
    if any(words for _, words in answers):
        shared = CheckpointError(_summary(doing, [words for _, words in answers]))
        shared.on_all_ranks = True        # so that one rank prints it for all
        raise shared from error
    return [result for result, _ in answers]


def _words(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _summary(doing: str, answers: list[str | None]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, words in enumerate(answers):
        if words:
            ranks_of.setdefault(words, []).append(rank)
    if len(answers) == 1:
        return f"{doing}: {answers[0]}"
    named = [f"rank {', '.join(map(str, ranks[:NAMED_RANKS]))}{' ...' if len(ranks) > NAMED_RANKS else ''}: {words}"
             for words, ranks in list(ranks_of.items())[:NAMED_RANKS]]
    if len(ranks_of) > NAMED_RANKS:
        named.append(f"and others on {len(ranks_of) - NAMED_RANKS} more ranks")
    return f"{doing}: {'; '.join(named)}"
