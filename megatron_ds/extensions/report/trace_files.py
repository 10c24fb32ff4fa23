"""Timelines of pipeline ranks as files, in the JSON format of Chrome's trace viewer, and as simulations.

    {"traceEvents": [{"name": "F3@1", "cat": "F", "ph": "X", "ts": 12.5, "dur": 4.0, "pid": 1, "tid": 0,
                      "args": {"op": "F", "stage": 1, "microbatch": 3}}, …]}

Open the files in chrome://tracing or https://ui.perfetto.dev. One event per instruction: pid is the pipeline
rank, ts and dur are microseconds; tid 0 holds computations, 1 transfers, 2 reductions and gathers. Planned
and measured timelines have the same format, so they can be compared. Ranks may write one file each.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from ...errors import DataError
from ...host.regular_file import read_text, write_text
from ...pipeline.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op
from ...pipeline.simulate import Cost, Simulation
from ...pipeline.timeline import Entry

THREADS = ("computations", "transfers", "reductions")


def write_trace(path: Path | str, timelines: Mapping[int, Sequence[Entry]]) -> None:
    """Write the timelines of pipeline ranks into one file. Raises DataError if it is not regular, and OSError."""
    events: list[dict] = []
    for rank, entries in sorted(timelines.items()):
        events.append(
            {
                "name": "process_name",
                "ph": "M",
                "pid": rank,
                "tid": 0,
                "args": {"name": f"pipeline rank {rank}"},
            }
        )
        events += (
            {
                "name": "thread_name",
                "ph": "M",
                "pid": rank,
                "tid": tid,
                "args": {"name": name},
            }
            for tid, name in enumerate(THREADS)
        )
        events += (_event(rank, *entry) for entry in entries)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    write_text(path, text, DataError)


def read_traces(paths: Iterable[Path | str]) -> dict[int, list[Entry]]:
    """Pipeline rank → its timeline, from one file, or one for each rank. Raises DataError for other files."""
    timelines: dict[int, list[Entry]] = {}
    for path in paths:
        found = _read(Path(path))
        if twice := sorted(timelines.keys() & found.keys()):
            raise DataError(
                f"{path} contains pipeline rank {twice[0]}, "
                "and so does an earlier file: timelines of several pipelines "
                "(data-parallel ranks) cannot be combined. "
                "Use the files of one pipeline."
            )
        timelines |= found
    return timelines


def steps_of(timelines: Mapping[int, Sequence[Entry]]) -> list[dict[int, list[Entry]]]:
    """Return a recording of several steps, step by step: a step ends where a rank repeats a computation."""
    per_rank = {rank: _split(entries) for rank, entries in timelines.items()}
    number = min((len(steps) for steps in per_rank.values()), default=0)
    return [{rank: steps[n] for rank, steps in per_rank.items()} for n in range(number)]


def timelines_of(simulation: Simulation, unit: float = 1.0) -> dict[int, list[Entry]]:
    """Return a simulation as timelines; unit: seconds of its unit of time."""
    ranks = zip(simulation.schedule, simulation.starts, simulation.ends)
    return {
        rank: [(i, start * unit, end * unit) for i, start, end in zip(*its)]
        for rank, its in enumerate(ranks)
    }


def as_simulation(timelines: Mapping[int, Sequence[Entry]]) -> Simulation:
    """Timelines as a `Simulation`, for its bubble and pictures. Time is 0 at the first start."""
    everything = chain.from_iterable(timelines.values())
    begin = min((start for _, start, _ in everything), default=0.0)
    ranks = [timelines[rank] for rank in sorted(timelines)]
    return Simulation(
        tuple(tuple(i for i, _, _ in entries) for entries in ranks),
        tuple(tuple(start - begin for _, start, _ in entries) for entries in ranks),
        tuple(tuple(end - begin for _, _, end in entries) for entries in ranks),
    )


def typical_cost(timelines: Mapping[int, Sequence[Entry]]) -> Cost:
    """Return a cost function for the simulator: the median time of a computation at its stage, over micro-batches.

    Transfers and operations that were not recorded take no time; B and I + W are derived from one another.
    """
    # The median of each operation and stage.
    took = defaultdict(list)
    for entries in timelines.values():
        for i, start, end in entries:
            if i.op in COMPUTE:
                took[i.op, i.stage].append(end - start)
    typical = {key: median(times) for key, times in took.items()}
    for op, stage in list(typical):
        if op is Op.B:
            typical.setdefault((Op.I, stage), typical[op, stage] / 2)
            typical.setdefault((Op.W, stage), typical[op, stage] / 2)
        elif op is Op.I and (Op.W, stage) in typical:
            typical.setdefault(
                (Op.B, stage), typical[Op.I, stage] + typical[Op.W, stage]
            )
    return lambda i: typical.get((i.op, i.stage), 0.0)


def _event(rank: int, i: Instruction, start: float, end: float) -> dict:
    """Return the event of an instruction, in microseconds."""
    # The thread of its kind.
    if i.op in COMPUTE:
        tid = 0
    elif i.op in SENDS | RECEIVES:
        tid = 1
    else:
        tid = 2
    return {
        "name": str(i),
        "cat": i.op.name,
        "ph": "X",
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "pid": rank,
        "tid": tid,
        "args": {"op": str(i.op), "stage": i.stage, "microbatch": i.microbatch},
    }


def _read(path: Path) -> dict[int, list[Entry]]:
    """Pipeline rank → its timeline, from one file. Raises DataError for files without timelines."""
    try:
        events = json.loads(read_text(path, DataError))["traceEvents"]
        timelines: dict[int, list[Entry]] = {}
        for event in events:
            if event["ph"] == "X" and "op" in event["args"]:
                args = event["args"]
                start = event["ts"] / 1e6
                end = start + event["dur"] / 1e6
                i = Instruction(Op(args["op"]), args["stage"], args["microbatch"])
                timelines.setdefault(event["pid"], []).append((i, start, end))
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file. A run with --trace writes timelines."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a timeline of a pipeline ({type(error).__name__}: "
            f"{error}). Such files are written by --trace and by megatron-ds "
            "schedule --chrome-trace."
        ) from None
    return timelines


def _split(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the steps of one rank."""
    steps: list[list[Entry]] = []
    seen: set[Instruction] = set()
    for entry in entries:
        computes = entry[0].op in COMPUTE
        if not steps or computes and entry[0] in seen:
            steps.append([])
            seen = set()
        steps[-1].append(entry)
        if computes:
            seen.add(entry[0])
    return steps
