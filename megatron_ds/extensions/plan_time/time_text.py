"""What --plan-time prints: a step in seconds, the training in days, and what a step is spent on.

time of a step on 384 x NVIDIA A100 80GB, 8 a host (constants fitted to ...):
  a step                       102.0 s   2,048 samples, 41.1 k tokens/s
  ...
"""

import json
from collections.abc import Iterator
from pathlib import Path

from ...config import RunConfig
from ...errors import ConfigError
from ...planning.run_model import last_step
from ..dry_run.world_plan import WorldPlan
from .cluster import read_cluster
from .options import PlanTimeConfig
from .recorded_work import WorkRecorder
from .step_time import StepTime, step_time

BAR = 40  # characters of a whole step
DAY = 86400.0
HOURS = 24  # of a day
TERA = 1e12
MULTIPLE = (
    16  # of channels of a head: tiles of products of other widths are partly empty
)
THIN_RANKS = 8


class TimeText:
    """What --plan-time adds to a plan. Raises ConfigError for a file of a cluster that is none."""

    recorder = WorkRecorder

    def __init__(self, config: RunConfig):
        self._wanted = config.of(PlanTimeConfig)
        assert self._wanted.cluster is not None, "the rules have asked for it"
        self._cluster = read_cluster(self._wanted.cluster)

    def lines(self, plan: WorldPlan) -> Iterator[str]:
        """Yield the lines, and write the file of --plan-json."""
        time = step_time(plan, self._cluster)
        yield from time_lines(time)
        if self._wanted.plan_json:
            _write(Path(self._wanted.plan_json), time)


def time_lines(time: StepTime) -> Iterator[str]:
    """Yield the lines about a step."""
    plan = time.plan
    cluster = time.cluster
    device = cluster.device
    fitted = f" (constants fitted to {device.fitted})" if device.fitted else ""
    yield (
        f"time of a step on {plan.grid.world_size} x {device.name}, "
        f"{cluster.devices_per_host:.0f} a host{fitted}:"
    )
    yield from _rows(time)
    yield from _bars(time)
    yield _fit_line(plan, device.memory)
    yield from _warnings(plan)


def _rows(time: StepTime) -> Iterator[str]:
    """Yield seconds, speed, days and cost."""
    config = time.plan.config
    tokens = time.samples * config.model.seq_length
    each_second = tokens / time.seconds
    each_day = each_second * DAY
    speed = time.flops_per_device / TERA
    yield f"  a step         {time.seconds:10.3f} s    {tokens:,} tokens"
    yield f"  tokens         {each_second:10,.0f} /s   {each_day / 1e9:,.2f} G a day"
    yield f"  model FLOP/s   {speed:10.1f} T a device, MFU {time.mfu:.1%}"
    # What is recomputed keeps the devices busy, and is no work of the model.
    if time.plan.again_flops:
        hardware = time.hardware_flops_per_device
        share = hardware / time.peak
        yield (
            f"  with recomputed {hardware / TERA:9.1f} T a device, "
            f"{share:.1%} of the peak"
        )
    steps = last_step(config) + 1
    yield _training_line(time, steps)


def _training_line(time: StepTime, steps: int) -> str:
    """Return days and cost of all steps."""
    days = steps * time.seconds / DAY
    devices = days * time.plan.grid.world_size
    dollars = devices * HOURS * time.cluster.dollars_per_hour
    cost = f", ${dollars:,.0f}" if dollars else ""
    return f"  {steps:,} steps: {days:,.2f} days, {devices:,.1f} device-days{cost}"


def _bars(time: StepTime) -> Iterator[str]:
    """Yield a bar for each share of a step."""
    yield "  what a step is spent on:"
    for name, share in sorted(time.shares.items(), key=lambda pair: -pair[1]):
        yield f"    {name:24} {share:6.1%}  {'█' * round(BAR * share)}".rstrip()


def _fit_line(plan: WorldPlan, memory: float) -> str:
    worst = plan.worst
    word = "fits" if worst.peak <= memory else "does not fit"
    needed = worst.peak / 1e9
    return (
        f"  {word} {memory / 1e9:.0f} GB: rank {worst.rank} needs about {needed:.1f} GB"
    )


def _warnings(plan: WorldPlan) -> Iterator[str]:
    """Yield what published measurements showed to be slow."""
    model = plan.config.model
    width = model.head_dim
    if width % MULTIPLE:
        yield (
            f"  heads of {width} channels: attention runs below its speed; multiples of {MULTIPLE} are faster"
        )
    if plan.config.train.micro_batch_size == 1 and plan.grid.tp >= THIN_RANKS:
        yield (
            f"  micro-batches of 1 at {plan.grid.tp} tensor-parallel ranks: products are thin; 2 or more are faster "
            "if they fit"
        )


def _write(path: Path, time: StepTime) -> None:
    """Write the numbers; the file appears whole or not at all."""
    values = {
        "seconds": time.seconds,
        "pipeline_seconds": time.pipeline,
        "reduction_seconds": time.reduction,
        "update_seconds": time.update,
        "gather_seconds": time.gather,
        "tokens_per_second": time.samples
        * time.plan.config.model.seq_length
        / time.seconds,
        "model_flops_per_device": time.flops_per_device,
        "hardware_flops_per_device": time.hardware_flops_per_device,
        "shares": time.shares,
        "peak_bytes": time.plan.worst.peak,
        "fits": time.plan.worst.peak <= time.cluster.device.memory,
    }
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--plan-json {path}: {error}") from error
