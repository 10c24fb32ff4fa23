"""`metrics.jsonl`: the records of a run, one JSON object a line. The file is only ever appended to.

    {"kind": "train", "run": "5f0c…", "start": 1763832150.125031, "time": 1763832163.482114, "step": 10, "loss": 6.23, …}

    kind   "train", "validation" or "test"
    run    id of the run, the same after each resume
    start  when the process that wrote the record started; distinguishes repeated steps from the first try
    time   when the record was written; both in seconds since the epoch

A run that resumes from step 10 after a crash at step 15 writes steps 11 to 15 a second time. The rule for readers is: of
several records of one run with the same kind and step, the newest (the last in the file) counts. `read_metrics` follows it.
"""

import io
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path

from ..config import RunConfig
from ..errors import ConfigError, DataError
from ..ramps import Progress
from .records import Record
from .sink import AppendedFile, check_folder

FIRST_KEY = b'{"kind": '                                   # how each line begins


class MetricsFile:
    """The sink. Values that are not finite are written as null."""

    def __init__(self, path: Path, run_id: str):
        self.place, self.run_id, self.start = path, run_id, _now()
        self._file = AppendedFile(path, is_lines=True)

    @classmethod
    def open(cls, config: RunConfig, progress: Progress, run_id: str) -> "MetricsFile | None":
        path = metrics_path(config)
        return cls(path, run_id) if path else None

    @classmethod
    def check(cls, config: RunConfig) -> None:
        path = metrics_path(config)
        if path is None:
            return
        check_folder("--metrics-path", path.parent)
        if path.exists() and not path.is_file():
            raise ConfigError(f"--metrics-path {path} is not a file. Name a file, such as {path}/metrics.jsonl.")
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            first = file.readline()
        if not (_is_cut(first) or _record(first)):
            raise ConfigError(f"--metrics-path {path} exists and does not hold metrics, so no records can be appended to it. "
                              "Name another file, or remove this one.")

    def write(self, record: Record) -> None:
        fields = {"kind": record.kind, "run": self.run_id, "start": self.start, "time": _now(), **record.fields()}
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        self._file.append(json.dumps(clean).encode() + b"\n")


def metrics_path(config: RunConfig) -> Path | None:
    path, save = config.logging.metrics_path, config.checkpoint.save
    return Path(path) if path else Path(save) / "metrics.jsonl" if save else None


def read_metrics(path: Path) -> list[dict]:
    """The records of the newest run in the file, ordered by step; of repeated steps the newest record.

    The newest run is that of the last record. Records without an id, of an earlier version, count as that run's. Lines cut
    off by a crash are skipped; DataError is raised for any other line that is not a record.
    """
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        record = _record(line)
        if record:
            records.append(record)
        elif not _is_cut(line):
            raise DataError(f"{path}, line {number}: not a record of a run. Was the file edited?")
    return newest(records)


def newest(records: Iterable[dict]) -> list[dict]:
    """The records of the run that wrote the last one, by step; the last of each kind and step."""
    records = list(records)
    run = records[-1].get("run") if records else None
    last = {(r["step"], r["kind"]): r for r in records if r.get("run") in (run, None)}
    return sorted(last.values(), key=lambda r: r["step"])


def _record(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
        return record if isinstance(record["step"], int) and isinstance(record["kind"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_cut(line: bytes) -> bool:
    """Empty, or the beginning of a record; a crash of the machine may leave zero bytes in place of text."""
    start = line.strip(b"\0\r\n")[:len(FIRST_KEY)]
    return FIRST_KEY.startswith(start)


def _now() -> float:
    return round(time.time(), 6)
