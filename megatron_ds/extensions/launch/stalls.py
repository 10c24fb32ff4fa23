"""`Stalls`: the reports of all hosts, and whether together they mean that the job hangs.

One rank that waits is no hang, since it may wait for a rank that saves or reads data. The job hangs when all hosts
report ranks that do not move, and the rank that is behind has passed its own limit. A host that reports nothing while
the others do not move is lost.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .rank_places import NodeReport, behind, hang_text, table_text

HANG_CODE = 75  # of a job that was ended since a rank did not move
SILENT_SECONDS = 6.0  # agents report each second


@dataclass(frozen=True)
class Hang:
    """host: of the rank that is behind, or the one that is lost; "" where devices of several hosts may be behind.
    text: what the user reads first; table: of all"""

    host: str
    text: str
    table: str


class Stalls:
    """The newest report of each host. hosts: those that report; sees_all: the job has no other hosts"""

    def __init__(self, hosts: Sequence[str], sees_all: bool = True):
        self._hosts = hosts
        self._sees_all = sees_all
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        self.step = -1

    def add(self, report: NodeReport) -> None:
        """Take a report that has come."""
        self._reports[report.host] = (time.monotonic(), report)
        self.step = max([self.step, *(rank.step for rank in report.ranks)])

    def lost(self, ended: Collection[str]) -> list[str]:
        """Return the hosts that were lost, the first one first. All processes of the launcher have ended.

        ended: hosts whose connection ended by itself, and not since the launcher ended it
        An agent reports its end. If the launcher ended it before that, it is lost only if it was silent: its host
        may have been healthy, and only slow.
        """
        # The host that has been silent for the longest time comes first.
        missing = [host for host in self._hosts if not self._has_ended(host)]
        missing.sort(key=self._time_of)
        alone = [host for host in missing if host in ended]
        # If some hosts were silent, only these are lost.
        newest = max(map(self._time_of, self._hosts))
        limit = newest - SILENT_SECONDS
        silent = [host for host in alone or missing if self._time_of(host) < limit]
        return silent or alone

    def _time_of(self, host: str) -> float:
        """Return when a host last reported."""
        if host not in self._reports:
            return -math.inf
        when, _ = self._reports[host]
        return when

    def _has_ended(self, host: str) -> bool:
        if host not in self._reports:
            return False
        _, report = self._reports[host]
        return report.is_last

    def hang(self) -> Hang | None:
        """Return what hangs; None if the job does not."""
        now = time.monotonic()
        reports = dict(self._reports)  # another thread adds to it
        if len(reports) < len(self._hosts):
            return None
        running = {
            host: (now - when, report)
            for host, (when, report) in reports.items()
            if not report.is_last
        }
        silent = [host for host, (age, _) in running.items() if age > SILENT_SECONDS]
        recent = [report for host, (_, report) in running.items() if host not in silent]
        # No rank of any host that reports moves.
        if not recent or not all(report.ranks for report in recent):
            return None
        ranks = [rank for report in recent for rank in report.ranks]
        first = behind(ranks)
        if silent and any(rank.idle_seconds > rank.limit_seconds for rank in ranks):
            return Hang(silent[0], _silent_text(silent), table_text(ranks))
        if silent or not first.has_passed_its_limit:
            return None
        # It may wait for a rank of a host that is not seen.
        if not self._sees_all and first.may_wait_for_others:
            return None
        return Hang(first.host, hang_text(first, len(ranks)), table_text(ranks))


def _silent_text(hosts: Sequence[str]) -> str:
    names = ", ".join(hosts)
    return (
        f"no report of {names} for more than {SILENT_SECONDS:.0f} s, and the ranks of all other hosts do not move: "
        "the host or the network to it is down."
    )
