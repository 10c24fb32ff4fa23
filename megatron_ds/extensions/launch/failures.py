"""`Failure`: a rank that ended with an error, as a node reports it and the launcher prints it last.

A node reports a failure as one line of its output that begins with MARK, so that it passes through ssh, pdsh and
srun alike. The launcher keeps these lines back and prints the earliest failure when all has ended.
"""

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass

MARK = "::megatron-ds failure::"
SIGNAL_HINTS = {
    "SIGKILL": "the kernel does this where memory runs out (dmesg lists it), and so does a job's limit",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "shared memory or a mapped file ran out of space",
    "SIGTERM": "something asked it to end: the launcher, a scheduler or a user",
}


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error.

    code     exit code; negative: the number of the signal that ended it
    time     seconds since 1970 at which the error arose
    message  what the rank recorded of its error, else its last lines of output
    log      its log file, "" for none
    place    what it did last, "" if that is not known
    is_passing  whether a restart may end better
    """

    rank: int
    local_rank: int
    host: str
    code: int
    time: float
    message: str
    log: str = ""
    place: str = ""
    is_passing: bool = True

    @property
    def exit_code(self) -> int:
        """Return the exit code of a shell: 128 + the number of a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        """The last line of the error; "" for a rank that a signal ended."""
        lines = self.message.split("\n") if self.code > 0 else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def line(self, now: float) -> str:
        """Return the line that a node prints. Its time counts from `now`, since clocks of hosts differ."""
        return MARK + json.dumps(asdict(self) | {"time": self.time - now})

    def text(self) -> str:
        """Return the text for the user."""
        how = f"exit code {self.code}"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            hint = SIGNAL_HINTS.get(name)
            how = name + (f": {hint}" if hint else "")
        place = f"rank {self.rank} on {self.host} (local rank {self.local_rank})"
        log = f"\nit was at {self.place}" if self.place else ""
        log += f"\nits whole output: {self.log}" if self.log else ""
        return f"{place} failed first, {how}\n{self.message.rstrip()}{log}"


def failure_in(line: str, now: float) -> Failure | None:
    """Return the failure that a line of a node's output reports at the time `now`; pdsh puts the host before it."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        values = json.loads(text)
        return Failure(**values | {"time": now + values["time"]})
    except (ValueError, TypeError, KeyError):
        return None  # a line that was cut


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the earliest one, which is the cause of the others: they fail because a peer is gone."""
    return min(failures, key=lambda failure: (failure.time, failure.rank), default=None)
