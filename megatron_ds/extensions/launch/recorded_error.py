"""`RecordedError`: the error that a rank wrote into torchrun's error file, as `cli.py` and torch's `record` do."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RecordedError:
    """time: seconds since 1970, in whole seconds; 0 if it is not known. is_passing: a restart may end better"""

    message: str = ""
    time: float = 0.0
    is_passing: bool = True

    @classmethod
    def read(cls, path: Path) -> "RecordedError":
        """Return the error of a file; one without a message if there is no such file."""
        try:
            message = json.loads(path.read_text())["message"]
            if isinstance(message, str):
                return cls(message)
            info = message["extraInfo"]
            return cls(
                str(info.get("py_callstack") or message["message"]),
                float(info["timestamp"]),
                bool(info.get("is_passing", True)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def time_before(self, ended: float) -> float:
        """Return when a rank failed that ended at a time. An error that follows from that of another rank has a later
        time than its end."""
        if not self.time:
            return ended
        return self.time if self.time > ended else min(ended, self.time + 1)
