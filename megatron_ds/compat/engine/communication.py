"""The communication log of a program's engines: "comms_logger" of their JSON, printed by `comm.log_summary`.

A program has one, as in DeepSpeed, so `log_summary` takes no engine. It is in a ContextVar, so that ranks which are
threads of one process have one each.
"""

import pickle
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from ...config import RunConfig
from ...features import Provided
from ...mpu.group import Group
from ..deepspeed.external_groups import DataParallelWorld
from .engine import show

# A module of `log_of_run`, `LoggedMessage`, `seconds_of_groups` and `table_text`.
COMMUNICATION_LOG: Provided[Any] = Provided("communication log")
_log: ContextVar[tuple[Any, Group] | None] = ContextVar(
    "communication log", default=None
)


def record_communication(settings: RunConfig, world: DataParallelWorld) -> None:
    """Record the collectives of an engine's groups from now on, if its JSON asks for that.

    Engines that ask have one log, with the operations of the first. Engines on the same Mesh share their groups.
    """
    logs = COMMUNICATION_LOG.find()
    log = logs and logs.log_of_run(settings, world.rank, world.device)
    if log is None:
        return
    found = _log.get()
    log = found[0] if found else log
    world.traffic.log = log
    _log.set((log, world.world))


def recorded_call(
    operation: str,
    ranks: Sequence[int],
    num_bytes: int,
    async_op: bool,
    begin: Callable[[], Any],
) -> Any:
    """Return a collective that a program calls itself, recorded as one of the group "program".

    ranks      of its group; none where this one is not in it
    num_bytes  payload, as of `LoggedMessage`
    begin      starts it in the background
    """
    found = _log.get()
    if found is None or not ranks:
        work = begin()
    else:
        kind = COMMUNICATION_LOG.get().LoggedMessage
        message = kind(operation, "program", len(ranks), ranks[0], num_bytes)
        work = found[0].record(message, begin)
    if async_op or work is None:
        return work
    work.wait()
    return None


def recorded_objects(
    operation: str,
    ranks: Sequence[int],
    exchange: Callable[[], Any],
    objects: Callable[[], Sequence[Any]],
) -> None:
    """An exchange of objects that a program waits for, recorded as one of the group "objects".

    objects  those that it moved, after it; the payload is their pickles
    """
    found = _log.get()
    if found is None or not ranks:
        exchange()
        return
    log = found[0]
    started = log.now()
    exchange()
    num_bytes = sum(len(pickle.dumps(moved)) for moved in objects())
    kind = COMMUNICATION_LOG.get().LoggedMessage
    log.add(kind(operation, "objects", len(ranks), ranks[0], num_bytes), started)


def show_communication(has_waits: bool = False) -> bool:
    """Show the table of rank 0 so far. False where no engine asks for it.

    has_waits: with the time of each row above that of the fastest rank. Collective over the world then
    """
    found = _log.get()
    if found is None:
        return False
    log, world = found
    log.complete_rows()
    logs = COMMUNICATION_LOG.get()
    of_groups = logs.seconds_of_groups(log, world) if has_waits else None
    if world.rank == 0:
        show(logs.table_text(log, world.ranks[0], of_groups))
    return True
