"""The table of the communication log (--comms-logger), with the time that is lost to slow ranks.

    communication of rank 0
      operation      group           message   calls       sum     time     mean  GB/s of payload   of a link   waited
      all_reduce     dp-cp of 4      16.8 MB      10    168 MB   95.1 ms  9.51 ms           1.76        2.65    41.0 ms
      …

Rows are sorted by time, then by bytes. "waited" is the time of this rank above that of the rank of its group that took
least: the rank that comes last to a collective waits for no other.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from ...mpu.collectives import all_gather_object
from ...mpu.communication_log import (
    CommunicationLog,
    HostClock,
    LoggedMessage,
    Spent,
    StreamClock,
    algorithmic_bandwidth,
    bus_bandwidth,
)
from ...mpu.group import Group
from .flops_profile import short

COLUMNS = "{:16}{:18}{:>10}{:>9}{:>10}"
TIMES = "{:>12}{:>12}{:>17}{:>12}"
WAITED = "{:>12}"


class Wish(Protocol):
    """The options, of `ProfilerConfig`."""

    comms_logger: bool
    comms_logger_verbose: bool
    comms_logger_ops: tuple[str, ...] | None


def make_log(wish: Wish, rank: int, device: torch.device) -> CommunicationLog | None:
    """The log that the options ask for; None without --comms-logger. Rank 0 logs single calls, if any does."""
    if not wish.comms_logger:
        return None
    return CommunicationLog(
        wish.comms_logger_ops,
        is_verbose=wish.comms_logger_verbose and rank == 0,
        clock=StreamClock() if device.type == "cuda" else HostClock(),
    )


def least_seconds(log: CommunicationLog, world: Group) -> dict[LoggedMessage, float]:
    """For each row, the time of the rank of its group that took least. Collective over the world."""
    found: dict[LoggedMessage, float] = {}
    for rows in all_gather_object(log.complete_rows(), world):
        for message, spent in rows.items():
            least = found.get(message, spent.seconds)
            found[message] = min(least, spent.seconds)
    return found


def table_text(
    log: CommunicationLog, rank: int, least: Mapping[LoggedMessage, float] | None = None
) -> str:
    """The table of this rank, of calls whose times are known: after an error a device may never come to the others.

    least: of `least_seconds`, for the column "waited"; None: without it
    """
    return "\n".join(_lines(log, rank, least))


def _lines(
    log: CommunicationLog, rank: int, least: Mapping[LoggedMessage, float] | None
) -> Iterator[str]:
    if not log.rows:
        yield f"communication of rank {rank}: none"
        return
    # The head.
    head = COLUMNS.format("operation", "group", "message", "calls", "sum")
    head += TIMES.format("time", "mean", "GB/s of payload", "of a link")
    yield f"communication of rank {rank}"
    if least is not None:
        head += WAITED.format("waited")
    yield f"  {head}"
    # The rows, the costliest first.
    by_cost = lambda row: (-row[1].seconds, -row[0].num_bytes * row[1].calls)
    for message, spent in sorted(log.rows.items(), key=by_cost):
        line = COLUMNS.format(
            message.operation,
            f"{message.axes} of {message.size}",
            f"{short(message.num_bytes)}B",
            spent.calls,
            f"{short(message.num_bytes * spent.calls)}B",
        )
        line += _times(message, spent)
        if least is not None:
            line += WAITED.format(_ms(spent.seconds - least[message]))
        yield f"  {line}"


def _times(message: LoggedMessage, spent: Spent) -> str:
    return TIMES.format(
        _ms(spent.seconds),
        _ms(spent.seconds / spent.calls),
        f"{algorithmic_bandwidth(message, spent) / 1e9:.3g}",
        f"{bus_bandwidth(message, spent) / 1e9:.3g}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
