"""`Run`: the records of the newest run in a metrics file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ...training.observe.metrics_file import newest_run


@dataclass(frozen=True)
class Run:
    """name: the folder or file as given; records: in the order of the file, repeated steps included."""

    name: str
    records: list[dict]

    def last_of_steps(self, kind: str) -> list[dict]:
        """Return the records of a kind in order of steps; of a repeated step, the newest."""
        last = {r["step"]: r for r in self.records if r["kind"] == kind}
        return [last[step] for step in sorted(last)]

    @property
    def settings(self) -> Mapping[str, tuple[str, str]]:
        """Path of an option → (value as text, source), of the newest process; empty if not recorded."""
        return self._newest("settings")

    @property
    def environment(self) -> Mapping[str, str]:
        """Name → text, as the newest process recorded it; empty if not recorded."""
        return self._newest("environment")

    def _newest(self, name: str) -> Mapping:
        found = [r[name] for r in self.records if r["kind"] == "process"]
        return found[-1] if found else {}


def metrics_file(place: Path) -> Path:
    """Return the file of a run that is given as a folder or as the file itself."""
    return place / "metrics.jsonl" if place.is_dir() else place


def read_run(place: Path) -> Run:
    """Return the newest run of metrics.jsonl in a folder, or of a file.

    Raises DataError if there is no such file, or if it holds no records.
    """
    path = metrics_file(place)
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. Give a --save folder that holds metrics.jsonl, or the file that "
            "--metrics-jsonl named."
        )
    records = newest_run(path)
    if not records:
        raise DataError(
            f"{path} holds no records. A run writes the first one when its training begins."
        )
    return Run(str(place), records)
