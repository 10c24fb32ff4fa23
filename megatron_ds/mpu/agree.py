"""Run an action that may fail on some ranks: all ranks continue, or all raise the same error.

Without this, a file that one machine lacks, or a disk that is full on one, would leave the other ranks
waiting in their next collective until it times out.

    on_all_ranks(world, action)             every rank runs it and gets its own result
    on_one_rank(world, action, rank=0)      one rank runs it, all get that result
    gather_from_all_ranks(world, action)    every rank runs it, all get all results

Each is collective over `world`: one all-gather of errors and, but for the first, of results, which must be
picklable. The action itself must not communicate.

The error: an instance of `kind`, else of the class of the first rank's error if that is one of this package's
and MegatronDSError if not. Its message names the ranks unless all failed alike, and begins with `doing`. Its
attribute `on_all_ranks` is True, so that one rank prints it for all (`cli.main_guard`). Without `kind`, an
error that is neither of this package nor an OSError is a defect: the rank it occurred on raises it unchanged,
with its traceback.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

from ..errors import MegatronDSError
from .collectives import all_gather_object
from .group import Group

T = TypeVar("T")
Kind = type[MegatronDSError]

MOST_NAMED = 8  # ranks that a message lists for one text
MOST_TEXTS = 3  # different texts in a message; more would bury the first


class FailureWords(TypedDict):
    """The words and the class of the error of several actions, for `on_all_ranks(…, **failing)`."""

    doing: str
    kind: Kind


class _Failure(NamedTuple):
    kind: Kind
    text: str


def on_all_ranks(
    world: Group, action: Callable[[], T], *, doing: str = "", kind: Kind | None = None
) -> T:
    """`action()` of this rank; see above for the error when any rank's action failed."""
    result, error = _attempt(action)
    failures = all_gather_object(_failure_of(error, kind), world)
    _raise_on_all_ranks(failures, error, doing, kind)
    return cast(T, result)  # it did not fail


def on_one_rank(
    world: Group,
    action: Callable[[], T],
    rank: int = 0,
    *,
    doing: str = "",
    kind: Kind | None = None,
) -> T:
    """`action()` of the rank at position `rank`, on every rank; the others' `action` is not called."""
    result, error = _attempt(action) if world.rank == rank else (None, None)
    outcome = all_gather_object((result, _failure_of(error, kind)), world)[rank]
    _raise_on_all_ranks([outcome[1]], error, doing, kind)
    return outcome[0]


def gather_from_all_ranks(
    world: Group, action: Callable[[], T], *, doing: str = "", kind: Kind | None = None
) -> list[T]:
    """`action()` of every rank, in rank order."""
    result, error = _attempt(action)
    outcomes = all_gather_object((result, _failure_of(error, kind)), world)
    _raise_on_all_ranks([failure for _, failure in outcomes], error, doing, kind)
    return [result for result, _ in outcomes]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except (
        Exception
    ) as error:  # of any class: the other ranks wait in the all-gather that follows
        return None, error


def _failure_of(error: Exception | None, kind: Kind | None) -> _Failure | None:
    """Return what the other ranks need to raise. The text of a foreign error begins with its class."""
    if error is None:
        return None
    if isinstance(error, MegatronDSError):
        return _Failure(kind or type(error), str(error))
    named = kind is not None or not isinstance(error, OSError)
    return _Failure(
        kind or MegatronDSError,
        f"{type(error).__name__}: {error}" if named else str(error),
    )


def _raise_on_all_ranks(
    failures: Sequence[_Failure | None],
    error: Exception | None,
    doing: str,
    kind: Kind | None,
) -> None:
    failed = [failure for failure in failures if failure]
    if not failed:
        return
    if (
        error is not None
        and kind is None
        and not isinstance(error, MegatronDSError | OSError)
    ):
        raise error
    message = _summary([failure and failure.text for failure in failures])
    shared: Any = failed[0].kind(f"{doing}: {message}" if doing else message)
    shared.on_all_ranks = True
    raise shared from error


def _summary(texts: Sequence[str | None]) -> str:
    """ "rank 1, 2: a file is missing; rank 3: …". texts: of each rank, None where it did not fail."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and None not in texts:
        return next(iter(ranks_of))
    named = [
        f"rank {', '.join(map(str, ranks[:MOST_NAMED]))}{' ...' if len(ranks) > MOST_NAMED else ''}: "
        f"{text}"
        for text, ranks in list(ranks_of.items())[:MOST_TEXTS]
    ]
    if len(ranks_of) > MOST_TEXTS:
        named.append(
            f"and others on {sum(map(len, list(ranks_of.values())[MOST_TEXTS:]))} more ranks"
        )
    return "; ".join(named)
