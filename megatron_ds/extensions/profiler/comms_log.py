"""The table of the communication log (--comms-logger), with the time that is lost to slow ranks.

    communication of rank 0
      operation    group        message  calls     sum     time    payload   of a link   waited  others waited
      all_reduce   dp-cp of 4   16.8 MB     10  168 MB  95.1 ms  1.77 GB/s   2.65 GB/s  41.0 ms         2.1 ms
      …
      in all                                10  168 MB  95.1 ms                         41.0 ms         2.1 ms

Rows are sorted by time, then by bytes. "waited" is the time of this rank above that of the rank of its group that took
least: the rank that comes last to a collective waits for no other. "others waited" is how much longer the rank took
that waited most: of a rank that is always the last one, "waited" is 0 and this is what it costs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from ...config import RunConfig
from ...mpu.collectives import all_gather_object
from ...mpu.group import Group
from .communication_log import (
    CommunicationLog,
    HostClock,
    LoggedMessage,
    Spent,
    StreamClock,
    algorithmic_bandwidth,
    bus_bandwidth,
)
from .options import ProfilerConfig
from .short import short

COLUMNS = "{:16}{:18}{:>10}{:>9}{:>10}"
TIMES = "{:>12}{:>12}{:>12}{:>13}"
WAITED = "{:>12}{:>15}"
WHOLE = {"tp", "cp", "dp", "pp"}  # axes of all ranks of a run


class Range(NamedTuple):
    """Seconds of the rank of a group that took least for a row, and of the one that took most."""

    least: float
    most: float


class Wish(Protocol):
    """The options, of `ProfilerConfig`."""

    @property
    def comms_logger(self) -> bool:
        """Whether messages are logged."""

    @property
    def comms_logger_verbose(self) -> bool:
        """Whether single calls are."""

    @property
    def comms_logger_ops(self) -> tuple[str, ...] | None:
        """Operations that are logged; None: all."""


def make_log(wish: Wish, rank: int, device: torch.device) -> CommunicationLog | None:
    """Return the log that the options ask for; None without --comms-logger. Rank 0 logs single calls, if any does."""
    if not wish.comms_logger:
        return None
    return CommunicationLog(
        wish.comms_logger_ops,
        is_verbose=wish.comms_logger_verbose and rank == 0,
        clock=StreamClock() if device.type == "cuda" else HostClock(),
    )


def log_of_run(
    config: RunConfig, rank: int, device: torch.device
) -> CommunicationLog | None:
    """Return the log of --comms-logger; None without it."""
    return make_log(config.of(ProfilerConfig), rank, device)


def seconds_of_groups(
    log: CommunicationLog, world: Group
) -> dict[LoggedMessage, Range]:
    """For each row, the times of its group. Collective over the world."""
    found: dict[LoggedMessage, Range] = {}
    for rows in all_gather_object(log.complete_rows(), world):
        for message, spent in rows.items():
            own = Range(spent.seconds, spent.seconds)
            before = found.get(message, own)
            least = min(before.least, spent.seconds)
            found[message] = Range(least, max(before.most, spent.seconds))
    return found


def table_text(
    log: CommunicationLog,
    rank: int,
    of_groups: Mapping[LoggedMessage, Range] | None = None,
) -> str:
    """Return the table of this rank, of calls whose times are known: after an error a device may never come to the
    others.

    of_groups: of `seconds_of_groups`, for the columns of waits; None: without them
    """
    return "\n".join(_lines(log, rank, of_groups))


def _lines(
    log: CommunicationLog, rank: int, of_groups: Mapping[LoggedMessage, Range] | None
) -> Iterator[str]:
    if not log.rows:
        yield f"communication of rank {rank}: none"
        return
    # The head.
    head = COLUMNS.format("operation", "group", "message", "calls", "sum")
    head += TIMES.format("time", "mean", "payload", "of a link")
    yield f"communication of rank {rank}"
    if of_groups is not None:
        head += WAITED.format("waited", "others waited")
    yield f"  {head}"
    # The rows, the costliest first.
    by_cost = lambda row: (-row[1].seconds, -row[0].num_bytes * row[1].calls)
    waits: list[tuple[float, float]] = []
    for message, spent in sorted(log.rows.items(), key=by_cost):
        line = COLUMNS.format(
            message.operation,
            _group_name(message),
            f"{short(message.num_bytes)}B",
            spent.calls,
            f"{short(message.num_bytes * spent.calls)}B",
        )
        line += _times(message, spent)
        if of_groups is not None:
            least, most = of_groups[message]
            waits.append((spent.seconds - least, most - spent.seconds))
            line += WAITED.format(*map(_ms, waits[-1]))
        yield f"  {line}"
    yield f"  {_total(log, waits)}"


def _total(log: CommunicationLog, waits: list[tuple[float, float]]) -> str:
    """Return the last line: all calls, bytes and times."""
    num_bytes = sum(m.num_bytes * spent.calls for m, spent in log.rows.items())
    calls = sum(spent.calls for spent in log.rows.values())
    seconds = sum(spent.seconds for spent in log.rows.values())
    line = COLUMNS.format("in all", "", "", calls, f"{short(num_bytes)}B")
    line += TIMES.format(_ms(seconds), "", "", "")
    return line + WAITED.format(*map(_ms, map(sum, zip(*waits)))) if waits else line


def _group_name(message: LoggedMessage) -> str:
    """ "world of 8" for the group of all axes, else such as "dp-cp of 4"."""
    is_whole = WHOLE <= set(message.axes.split("-"))
    return f"{'world' if is_whole else message.axes} of {message.size}"


def _times(message: LoggedMessage, spent: Spent) -> str:
    return TIMES.format(
        _ms(spent.seconds),
        _ms(spent.seconds / spent.calls),
        f"{short(algorithmic_bandwidth(message, spent))}B/s",
        f"{short(bus_bandwidth(message, spent))}B/s",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
