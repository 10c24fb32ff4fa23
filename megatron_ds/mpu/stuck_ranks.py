"""Which rank is stuck, and what the others were doing: after a failed operation each rank reports to
torch.distributed's store; a stuck rank does not.

A timeout names the group that did not complete, not the rank that is stuck: in an all-reduce every rank
waits for every other, and across groups rank 1 may wait for rank 3, which waits for rank 2. All of them time
out at nearly the same time. So each rank reports its failure, waits for the reports of the others, and names
the missing ranks. A report contains the call that the rank is in (`doing`): where only some ranks have called
`save_checkpoint`, no rank is stuck, and these names show it.

Nothing here raises or blocks: the store may be on the rank that is stuck, so a thread accesses it, with a
time limit.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from ..host.torch_thread import torch_thread
from .attendance import absent_ranks

T = TypeVar("T")

REPORT_SECONDS = 10.0  # ranks that waited time out within a step of one another
LAST_REPORT_SECONDS = 2.0  # for the last one, when all others have reported
ANSWER_SECONDS = 3.0  # how long the store may take to answer
_NAMED = 8
_NOTHING = "no call of the engine"
_current = [""]  # the call that this process is in; also read by threads of autograd


@contextmanager
def doing(call: str) -> Iterator[None]:
    """Inside, a failure of a collective is reported with the name of this call."""
    before = _current[0]
    _current[0] = call
    try:
        yield
    finally:
        _current[0] = before


def current_call() -> str:
    """Return the name given to the innermost `doing`, "" outside of any."""
    return _current[0]


def register_host() -> None:
    """Write this rank's hostname into the store, to be named if the rank is stuck. Not collective."""
    _store().set(_host_key(dist.get_rank()), platform.node())


def report_failure() -> None:
    """Report that an operation failed on this rank, so that it is not named as stuck. Not collective."""
    within(ANSWER_SECONDS, lambda: _write(_store()))


def name_stuck_ranks(wait_seconds: float = REPORT_SECONDS) -> str | None:
    """Report this rank, wait for the reports of the others, and name the ranks that are missing. Not
    collective.

    Returns a sentence; None when the store stops responding before all reports are in.
    """
    size = dist.get_world_size()
    store = within(ANSWER_SECONDS, _store)
    if store is None or not within(ANSWER_SECONDS, lambda: _write(store)):
        return (
            "The store of torch.distributed does not respond: its process, rank 0 or torchrun's agent, "
            "is stuck or gone"
        )
    deadline = time.monotonic() + wait_seconds
    while (count := within(ANSWER_SECONDS, lambda: store.add("count", 0))) is not None:
        if count == size - 1:  # the last one may be about to report
            deadline = min(deadline, time.monotonic() + LAST_REPORT_SECONDS)
        if count == size or time.monotonic() > deadline:
            return within(ANSWER_SECONDS, lambda: _sentence(store, size))
        time.sleep(0.05)
    return None


def _store() -> dist.Store:
    """Return a connection of its own: the process group's may be in the middle of a request."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    store = world.get_group_store().clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return dist.PrefixStore("failed ranks", store)


def _write(store: dist.Store) -> bool:
    """Report this rank, once."""
    key = str(dist.get_rank())
    if not store.check([key]):
        store.set(key, current_call() or _NOTHING)
        store.add("count", 1)
    return True


def _host_key(rank: int) -> str:
    return f"host of {rank}"


def _host(store: dist.Store, rank: int) -> str:
    """Return the host of a rank in parentheses, "" if it is not known."""
    key = _host_key(rank)
    return f" (host {store.get(key).decode()})" if store.check([key]) else ""


def _sentence(store: dist.Store, size: int) -> str:
    missing = absent_ranks(store, range(size))
    if not missing:
        return (
            f"All {size} ranks report that they waited{_calls(store, range(size))}: they took different "
            "paths through the program"
        )
    names = ", ".join(f"{rank}{_host(store, rank)}" for rank in missing[:_NAMED])
    names += " and others" if len(missing) > _NAMED else ""
    which = f"rank {names} is" if len(missing) == 1 else f"ranks {names} are"
    waiting = sorted(set(range(size)) - set(missing))
    return (
        f"Of {size} ranks, all but {len(missing)} report that they waited{_calls(store, waiting)}; "
        f"{which} stuck: stopped, busy with something else, or on a host that is gone"
    )


def _calls(store: dist.Store, ranks: Sequence[int]) -> str:
    """ ", rank 0 in engine.save_checkpoint, ranks 1, 2 in engine.step"; "" where no rank is in a call."""
    ranks_of: dict[str, list[int]] = {}
    for rank, call in zip(
        ranks, store.multi_get([str(rank) for rank in ranks]) if ranks else ()
    ):
        ranks_of.setdefault(call.decode(), []).append(rank)
    if set(ranks_of) <= {_NOTHING}:
        return ""
    return "".join(
        f", {_named(of)} in {call}" for call, of in list(ranks_of.items())[:_NAMED]
    )


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_NAMED])) + (
        " and others" if len(ranks) > _NAMED else ""
    )
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of `call`, None if it raises or takes longer; its thread ends with the process."""
    result: list = []

    def run() -> None:
        try:
            result.append(call())
        except Exception:  # noqa: BLE001  the failure being reported has its own error
            pass

    torch_thread(run, "failure report").join(seconds)
    return result[0] if result else None
