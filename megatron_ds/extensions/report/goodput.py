"""How a run spent its wall time: from the start of its first process to its newest record."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from .recorded_run import Run

STARTS = ("process", "about")  # kinds of the records of a start
# Name of a part → what it is.
PARTS = {
    "training": "steps whose result the run has kept, without their waits for data",
    "repeated": "steps that a later process computed again, since it resumed from before them",
    "data": "steps waited for their batch",
    "evaluation": "steps waited for an evaluation",
    "saves": "steps waited for a checkpoint",
    "measuring": "plans and files of --record-memory-history, after the step that it measures",
    "starting": "each process, from its begin to its first step: imports, building, loading",
    "stopped": "from the last record of a process to the begin of the next",
    "unexplained": "the rest",
}


@dataclass(frozen=True)
class Goodput:
    """wall: seconds; parts: seconds by name of `PARTS`, whose sum is `wall`."""

    wall: float
    parts: dict[str, float]

    @property
    def explained(self) -> float:
        """The share of the wall time that has a name, 0 to 1."""
        if self.wall <= 0:
            return 0.0
        return 1 - abs(self.parts["unexplained"]) / self.wall


@dataclass(frozen=True)
class _Process:
    """The records of one process. began: of the process; ready: of its training; first: step before it."""

    records: list[dict]

    @property
    def ready(self) -> float:
        """When the first step could begin: records of the start are written just before. Files of earlier versions
        begin with a log line, and have only the moment at which the file was opened."""
        starts = takewhile(lambda record: record["kind"] in STARTS, self.records)
        times = [record["time"] for record in starts if "time" in record]
        first = self.records[0]
        return times[-1] if times else first.get("start", first.get("time", 0.0))

    @property
    def began(self) -> float:
        return self.records[0].get("began", self.ready)

    @property
    def end(self) -> float:
        return self.records[-1].get("time", self.ready)

    @property
    def first(self) -> int | None:
        return self.records[0]["step"] if "began" in self.records[0] else None

    def intervals(self) -> Iterator[tuple[int, dict]]:
        """(step before, record) of each log line. The first line of a process that did not record its start
        has no known number of steps, and is left out."""
        before = self.first
        for record in self.records:
            if record["kind"] != "train":
                continue
            if before is not None:
                yield before, record
            before = record["step"]


# Part → the field of a record with its seconds.
BETWEEN_STEPS = {
    "evaluation": "eval_seconds",
    "saves": "save_seconds",
    "measuring": "measuring_seconds",
}


def goodput(run: Run) -> Goodput:
    """Return how the wall time of the run was spent."""
    processes = _processes(run)
    parts = dict.fromkeys(PARTS, 0.0)
    previous = None
    for i, process in enumerate(processes):
        # A process starts before its first step, and the job stood still before that.
        parts["starting"] += process.ready - process.began
        if previous is not None:
            parts["stopped"] += max(0.0, process.began - previous.end)
        previous = process
        # Steps after the one from which a later process went on were computed twice.
        resumed = [later.first for later in processes[i + 1 :]]
        kept = min((step for step in resumed if step is not None), default=None)
        for before, record in process.intervals():
            steps = record["step"] - before
            lost = 0 if kept is None else record["step"] - max(before, kept)
            lost = min(steps, max(0, lost))
            data = record["data_seconds"]
            computing = record["step_seconds"] - data
            parts["data"] += data * steps
            parts["training"] += computing * (steps - lost)
            parts["repeated"] += computing * lost
        # Evaluations and saves are between the steps.
        for record in process.records:
            for part, field in BETWEEN_STEPS.items():
                parts[part] += record.get(field, 0.0)
    wall = processes[-1].end - processes[0].began
    parts["unexplained"] = wall - sum(parts.values())
    return Goodput(wall, parts)


def _processes(run: Run) -> list[_Process]:
    found: dict[float | None, list[dict]] = {}
    for record in run.records:
        found.setdefault(record.get("start"), []).append(record)
    return [_Process(records) for records in found.values()]
