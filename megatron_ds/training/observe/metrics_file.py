"""`metrics.jsonl`: the records of a run, one JSON object per line. The file only grows.

    {"kind": "train", "run": "5f0c…", "start": 1763832150.125031, "time": 1763832163.482114, "step": 10, …}

    kind   "train", "validation", "test"; "tasks": benchmarks of --eval-tasks; "spike": a step whose update
           --skip-spikes dropped; "rerun": one that --rerun-bad-steps computed again; "process": the start of a
           process, with its settings; "about": what it trains; "save": a complete checkpoint
    run    id of the run, the same after each resume
    start  when the process that wrote the record started, in s since the epoch; distinguishes repeated steps
    time   when the record was written, in seconds since the epoch

A run that resumes from step 10 after a crash at step 15 writes steps 11 to 15 a second time. Of several
records of one run with the same kind and step, readers use the newest, which is the last in the file.
`read_metrics` does so.
"""

import io
import json
import math
import time
from pathlib import Path

from ...checkpoint.place import is_store
from ...config import RunConfig
from ...errors import ConfigError, DataError
from ...host.regular_file import read_regular
from .records import Record
from .run_facts import RunFact
from .sink import AppendedFile, check_folder

FIRST_KEY = b'{"kind": '  # each line begins with it


class MetricsFile:
    """The sink for `metrics.jsonl`. Values that are not finite are written as null."""

    def __init__(self, path: Path, run_id: str):
        self.place = path
        self.run_id = run_id
        self.start = _now()
        self._file = AppendedFile(path, is_lines=True)

    def write(self, record: Record | RunFact) -> None:
        """Append the record as one line, or raise OSError and leave the file as it was."""
        fields = {
            "kind": record.kind,
            "run": self.run_id,
            "start": self.start,
            "time": _now(),
            **record.fields(),
        }
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in fields.items()
        }
        self._file.append(json.dumps(clean).encode() + b"\n")

    note = write


def metrics_path(config: RunConfig) -> Path | None:
    """--metrics-path, by default metrics.jsonl in the --save folder; None without either.

    Nothing can be appended to an object of a store, so --save s3://… has no default.
    """
    path = config.logging.metrics_path
    save = config.checkpoint.save
    if path:
        return Path(path)
    if save is None or is_store(save):
        return None
    return Path(save) / "metrics.jsonl"


def check_metrics_file(path: Path) -> None:
    """Raises ConfigError when records cannot be appended to the file."""
    check_folder("--metrics-path", path.parent)
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"--metrics-path {path} is not a file. Give a file, such as {path}/metrics.jsonl."
        )
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        first = file.readline()
    if not (_is_cut(first) or _record(first)):
        raise ConfigError(
            f"--metrics-path {path} exists and does not hold metrics, so no records can be "
            "appended to it. Give another file, or remove this one."
        )


def read_metrics(path: Path) -> list[dict]:
    """Return the records of the newest run in the file, ordered by step; of repeated steps the newest record.

    Raises DataError as `newest_run` does.
    """
    last = {(r["step"], r["kind"]): r for r in newest_run(path)}
    return sorted(last.values(), key=lambda r: r["step"])


def newest_run(path: Path) -> list[dict]:
    """Return the records of the newest run in the file, as they were written, repeated steps included.

    The newest run is that of the last record. Records without an id, from an earlier version, belong to it
    too. Lines cut off by a crash are skipped. Raises DataError for any other line that is not a record, and for a file
    that cannot be read.
    """
    try:
        content = read_regular(path, DataError)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    records = []
    for number, line in enumerate(content.splitlines(), 1):
        record = _record(line)
        if record:
            records.append(record)
        elif not _is_cut(line):
            raise DataError(
                f"{path}, line {number}: not a record of a run. Restore the file if it was "
                "edited, or remove that line."
            )
    run = records[-1].get("run") if records else None
    return [record for record in records if record.get("run") in (run, None)]


def _record(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
        return (
            record
            if isinstance(record["step"], int) and isinstance(record["kind"], str)
            else None
        )
    except (ValueError, KeyError, TypeError):
        return None


def _is_cut(line: bytes) -> bool:
    """Return whether a line is empty, zero bytes (after a crash of the machine) or the beginning of a record."""
    start = line.strip(b"\0\r\n")[: len(FIRST_KEY)]
    return FIRST_KEY.startswith(start)


def _now() -> float:
    return round(time.time(), 6)
