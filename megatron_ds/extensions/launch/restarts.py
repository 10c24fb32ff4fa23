"""Starts of a job: after a crash, a hang or a lost host it is started again, by rules that are pure functions.

The script continues from its newest checkpoint. MEGATRON_DS_RESTARTS is the number of its start, from 0 on.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .hostfile import Slots

USER_ERROR = 2  # exit code of a wrong command line or configuration
FAILURES_OF_A_HOST = 3  # after which it is left out, if there are others
STARTS_WITHOUT_PROGRESS = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How a start of the job ended.

    code      exit code of the launcher
    host      of the rank that failed first or does not move; "" if it is not known
    step      that was reached, -1 if it is not known
    is_final  a restart would not help: the configuration is wrong, or a signal asked for the end
    cause     last line of the error of the rank that failed first; "" if it is not known, or ended by a signal
    """

    code: int
    host: str = ""
    step: int = -1
    is_final: bool = False
    cause: str = ""


@dataclass(frozen=True)
class Policy:
    """max_restarts: of the job; min_nodes: fewest hosts of a start"""

    max_restarts: int
    min_nodes: int


def reason_to_end(starts: Sequence[Ended], policy: Policy) -> str:
    """Return why there is no further start; "" if there is one. starts: all so far; the last one ended by an error"""
    last = starts[-1]
    if last.is_final:
        return f"exit code {last.code}: a restart would end alike"
    if len(starts) > policy.max_restarts:
        return f"--max-restarts {policy.max_restarts} is reached"
    before = starts[:-STARTS_WITHOUT_PROGRESS]
    recent = starts[-STARTS_WITHOUT_PROGRESS:]
    furthest = max((start.step for start in before), default=-1)
    if furthest >= 0 and all(start.step <= furthest for start in recent):
        steps = ", ".join(str(max(start.step, 0)) for start in recent)
        return (
            f"no progress: the last {len(recent)} starts reached iterations {steps}, and an earlier one reached "
            f"{furthest}. Look for the cause of the failure, or save more often"
        )
    if before and last.cause and _are_alike([before[-1], *recent]):
        return (
            f"no progress: no rank has reported a step, and the last {len(recent)} starts ended as the one before "
            f"them: {last.cause}"
        )
    return ""


def _are_alike(starts: Sequence[Ended]) -> bool:
    """Return whether starts without a step ended by the same error."""
    errors = {(start.code, start.cause) for start in starts}
    return len(errors) == 1 and all(start.step < 0 for start in starts)


def pause_seconds(starts: Sequence[Ended]) -> float:
    """Seconds before the next start: more with each start that got no further."""
    steps = [start.step for start in starts]
    vain = len(steps) - 1 - steps.index(max(steps))
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**vain)


def without_failing(slots: Slots, starts: Sequence[Ended], policy: Policy) -> Slots:
    """Return the hosts without those that fail repeatedly; the worst go first, down to --min-nodes."""
    failures = Counter(start.host for start in starts)
    left = dict(slots)
    for host, count in failures.most_common():
        is_bad = host in left and count >= FAILURES_OF_A_HOST
        if is_bad and len(left) > policy.min_nodes:
            del left[host]
    return left


def fitting(
    slots: Slots, policy: Policy, problem: Callable[[int], str]
) -> tuple[Slots, str]:
    """Find (the most hosts, from the first on, whose world size fits; why not all of them, "" for all).

    problem: world size → what is wrong with it, "" for nothing. No hosts if none fits.
    """
    why = ""
    for count in range(len(slots), policy.min_nodes - 1, -1):
        left = dict(list(slots.items())[:count])
        found = problem(sum(map(len, left.values())))
        if not found:
            return left, why
        why = why or found
    return {}, why


@dataclass(frozen=True)
class Attempts:
    """What the starts of a job need.

    start      start the job on hosts, after so many restarts, and wait for its end
    answering  the hosts that can be reached now
    problem    world size → what is wrong with it, "" for nothing
    pause      wait for some seconds; False when a signal asks for the end
    note       print a line
    """

    start: Callable[[Slots, int], Ended]
    answering: Callable[[Slots], Slots]
    problem: Callable[[int], str]
    pause: Callable[[float], bool]
    note: Callable[[str], None]

    def run(self, slots: Slots, policy: Policy) -> int:
        """Return the exit code of the job."""
        used = slots
        ended: list[Ended] = []
        while True:
            last = self.start(used, len(ended))
            ended.append(last)
            if last.code == 0 or not policy.max_restarts:
                return last.code
            # An error that a restart cannot mend, or hosts that are too few, end the job.
            reason = reason_to_end(ended, policy)
            if not reason and not self.pause(pause_seconds(ended)):
                return last.code
            if not reason:
                used, reason = self._next_hosts(slots, ended, policy)
            if reason:
                self.note(f"no restart: {reason}.")
                return last.code
            self.note(
                f"restart {len(ended)} of at most {policy.max_restarts}, after iteration {max(last.step, 0)}"
            )

    def _next_hosts(
        self, slots: Slots, ended: Sequence[Ended], policy: Policy
    ) -> tuple[Slots, str]:
        """(the hosts of the next start, why there is none)"""
        there = self.answering(slots)
        for host in slots.keys() - there.keys():
            self.note(f"{host} does not answer, and is left out.")
        if len(there) < policy.min_nodes:
            return (
                {},
                f"{len(there)} of {len(slots)} hosts answer, and --min-nodes is {policy.min_nodes}",
            )
        left = without_failing(there, ended, policy)
        for host in there.keys() - left.keys():
            self.note(f"{host} failed {FAILURES_OF_A_HOST} times, and is left out.")
        # Fewer ranks may not fit the layout.
        used, why = fitting(left, policy, self.problem)
        if not used:
            return {}, f"the ranks of {len(left)} hosts do not fit the layout. {why}"
        if why:
            self.note(f"{len(used)} of {len(left)} hosts are used. {why}")
        return used, ""
