"""Show a pipeline schedule in the terminal, as a picture or as a Chrome trace: planned, or measured in a run.

    megatron-ds schedule --schedule 1f1b --pipeline-size 4 --microbatches 8
    megatron-ds schedule --schedule zb-v --pipeline-size 4 --microbatches 8 --output zb-v.svg
    megatron-ds schedule --schedule 1f1b zb-h1 zb-auto --pipeline-size 4 --microbatches 8 \\
        --costs 1 1.2 0.7 --transfer 0.05 --memory-limit 8 --output compared.png
    megatron-ds schedule --schedule zb-h1 --pipeline-size 2 --microbatches 4 \\
        --measured runs/traces --output both.svg

Times are in the units of --costs (seconds with --measured). The bubble is the fraction of all ranks' time in
which they do not compute. Pictures are .svg files, or .png files if matplotlib is installed. A Chrome trace
opens in https://ui.perfetto.dev. "peak alive" is the maximum number of live activations, each of one
micro-batch at one stage.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.cli import Arguments
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.report.picture import Panel, draw, save_png, svg
from megatron_ds.extensions.report.trace_files import (
    as_simulation,
    read_traces,
    steps_of,
    timelines_of,
    typical_cost,
    write_trace,
)
from megatron_ds.pipeline.instruction import Instruction, Op, StageCosts
from megatron_ds.pipeline.passes import add_transfers
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import Simulation, simulate
from megatron_ds.pipeline.timeline import Entry

WIDEST = 240  # columns of a drawing in the terminal
DRAW = {
    ".svg": lambda panels, path, width: path.write_text(
        svg(panels, width), encoding="utf-8"
    ),
    ".png": save_png,
}

# The schedules to plan.
PLAN: dict[str, dict[str, Any]] = {
    "--schedule": {
        "nargs": "+",
        "default": ["1f1b"],
        "metavar": "NAME",
        "help": f"one or more of {', '.join(SCHEDULES)}",
    },
    "--pipeline-size": {
        "type": int,
        "metavar": "P",
        "help": "pipeline ranks (default 4, or as --measured)",
    },
    "--microbatches": {
        "type": int,
        "metavar": "M",
        "help": "micro-batches of a step (default 8, or as --measured)",
    },
    "--chunks": {
        "type": int,
        "metavar": "V",
        "help": (
            "stages per rank (default: the fewest the "
            "schedule takes; 2 for interleaved)"
        ),
    },
    "--costs": {
        "nargs": 3,
        "type": float,
        "metavar": ("F", "I", "W"),
        "help": (
            "time of a rank's share of the model for one micro-batch: forward, backward of "
            "the input, of the weights; B takes I + W, and each of V stages takes 1/V of it "
            "(default 1 1 1; with --measured the measured times of each stage)"
        ),
    },
    "--transfer": {
        "type": float,
        "default": 0.0,
        "metavar": "T",
        "help": "time to send a tensor between two ranks (default 0)",
    },
    "--memory-limit": {
        "type": float,
        "metavar": "A",
        "help": "zb-auto: maximum number of micro-batches alive on a rank (default: P)",
    },
    "--group-size": {
        "type": int,
        "metavar": "G",
        "help": "interleaved: minimum number of consecutive micro-batches of a stage (default: P)",
    },
}

# Flags of what a run did, and of the files to write.
OPTIONS: dict[str, dict[str, Any]] = {
    "--measured": {
        "nargs": "+",
        "type": Path,
        "metavar": "PATH",
        "help": (
            "timelines written by a run with --trace: a folder, or the files of one "
            "pipeline"
        ),
    },
    "--step": {
        "type": int,
        "default": -1,
        "metavar": "N",
        "help": "step of --measured to show, from 0 (default: the last)",
    },
    "--output": {
        "type": Path,
        "metavar": "FILE",
        "help": "picture to write, .svg or .png",
    },
    "--width": {
        "type": int,
        "default": 1100,
        "metavar": "PIXELS",
        "help": "width of the picture (default 1100)",
    },
    "--chrome-trace": {
        "type": Path,
        "metavar": "FILE",
        "help": "JSON file to write, with the first schedule",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    args = _parser().parse_args(argv)
    measured = _measured(args) if args.measured else None
    panels = [_planned(name, args, measured) for name in args.schedule]
    if measured:
        panels.append(_measured_panel(measured))
    for panel in panels:
        print(panel.title)
        _print(panel.timeline)
    if args.output:
        if args.output.suffix not in DRAW:
            raise ConfigError(
                f"--output {args.output}: the file name must end in {' or '.join(DRAW)}."
            )
        args.output.parent.mkdir(parents=True, exist_ok=True)
        DRAW[args.output.suffix](panels, args.output, args.width)
        print(f"wrote {args.output}")
    if args.chrome_trace:
        _write_trace(panels[0], args)
    return 0


def _parser() -> Arguments:
    parser = Arguments(__doc__)
    parser.add_table(PLAN, "plan")
    parser.add_table(OPTIONS)
    return parser


def _planned(name: str, args, measured: dict | None) -> Panel:
    # Sizes that are not given follow from the timelines.
    p = _or(args.pipeline_size, len(measured) if measured else 4)
    m = _or(
        args.microbatches,
        len({i.microbatch for i, *_ in measured[0] if i.op is Op.F}) if measured else 8,
    )
    chunks = _or(
        args.chunks, 2 if name == "interleaved" else SCHEDULES[name].default_chunks
    )
    # Costs: --costs, else the measured ones, else 1 for each of F, I and W.
    make = SCHEDULES[name]
    whole = args.costs or (1.0, 1.0, 1.0)
    forward, input_grad, weight_grad = (time / chunks for time in whole)
    costs = StageCosts(forward, input_grad, weight_grad, args.transfer)
    said = {
        "costs": costs,
        "memory_limit": args.memory_limit,
        "group_size": args.group_size,
    }
    options = {option: said[option] for option in SCHEDULES[name].options}
    cost: Callable[[Instruction], float] = costs.of
    if measured and not args.costs:
        cost = typical_cost(measured)
    # The order of the schedule, and the time that it takes.
    order = make(p, m, chunks, **options)
    if measured and not args.costs:
        _check_stages(
            name, p * chunks, {i.stage for its in measured.values() for i, *_ in its}
        )
    timeline = simulate(add_transfers(order, p * chunks), cost)
    # The title has what a reader compares between schedules.
    what = f"{name}: {_count(p, 'rank')}, {_count(m, 'micro-batch')}" + (
        f", {chunks} stages a rank" if chunks > 1 else ""
    )
    return Panel(
        f"{what}, bubble {timeline.bubble:.1%}, span {timeline.span:.4g}", timeline
    )


def _check_stages(name: str, planned: int, measured: set[int]) -> None:
    if measured != {*range(planned)}:
        raise ConfigError(
            f"--measured has times of {len(measured)} stages, but {name} would have {planned} "
            "stages, whose times were not measured. Give --costs, or sizes that make "
            f"{len(measured)} stages."
        )


def _measured(args) -> dict[int, list[Entry]]:
    """Return the timelines of the step that was asked for."""
    paths = []
    for path in args.measured:
        paths += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise DataError(
            f"no timelines in {', '.join(map(str, args.measured))}: a run writes them (*.json) "
            "when started with --trace."
        )
    steps = steps_of(read_traces(paths))
    if not -len(steps) <= args.step < len(steps):
        raise ConfigError(
            f"--step {args.step}: {len(steps)} steps were recorded. Valid: 0 to "
            f"{len(steps) - 1}, or -1 for the last."
        )
    return steps[args.step]


def _measured_panel(timelines: dict[int, list[Entry]]) -> Panel:
    timeline = as_simulation(timelines)
    return Panel(
        f"measured: {_count(len(timeline.schedule), 'rank')}, bubble {timeline.bubble:.1%}, "
        f"span {timeline.span:.4g} s",
        timeline,
    )


def _print(timeline: Simulation) -> None:
    picture = draw(timeline)
    widest = max(len(line) for line in picture.splitlines())
    if widest > WIDEST:
        print(
            f"  ({widest} columns wide, too wide for the terminal: use --output for a picture)"
        )
    else:
        print(picture)
    print(f"  peak alive {' '.join(map(str, timeline.peak_live))}\n")


def _write_trace(panel: Panel, args) -> None:
    args.chrome_trace.parent.mkdir(parents=True, exist_ok=True)
    write_trace(args.chrome_trace, timelines_of(panel.timeline, unit=1e-3))
    print(
        f"wrote {args.chrome_trace}: {panel.title}; one unit of time is one millisecond"
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _count(n: int, noun: str) -> str:
    if n == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("h") else "s"
    return f"{n} {noun}{ending}"
