"""`Run`: the records of the newest run in a metrics file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    @property
    def about(self) -> Mapping[str, Any]:
        """What is trained, as `run_summary.summary_of` has it; empty in files of earlier versions."""
        return self._newest("about", kind="about")

    def _newest(self, name: str, kind: str = "process") -> Mapping:
        found = [record[name] for record in self.records if record["kind"] == kind]
        return found[-1] if found else {}


def titles(names: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths of runs in which they differ: of "runs/a" and "runs/b" a and b."""
    paths = []
    for name in names:
        place = Path(name).absolute()
        is_of_folder = place.name == "metrics.jsonl" and len(place.parts) > 2
        paths.append(place.parent if is_of_folder else place)
    # One part of a path is enough, unless runs have the same one.
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest):
        ends = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return list(names)


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
