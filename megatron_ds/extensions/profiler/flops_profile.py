"""The FLOPs profile of a step.

    FLOPs profile of step 2: 8 samples of 1024 tokens on 4 ranks
      layers               number   parameters         FLOPs of forward
      embedding                 1      38.6 M  31.0 %          0
      transformer block        12      85.1 M  68.4 %      1.60 T  75.8 %
      …
      phase                time: largest, smallest of all ranks       FLOP/s of a rank
      forward                     215.3 ms   198.1 ms                      2.53 T
      …

FLOPs are those of the model (planning/flops.py), with causal attention counted once; recomputation is stated
beside it. The FLOP/s of a phase are its FLOPs over all ranks divided by the sum of the times of the ranks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...planning.flops import utilization
from ...training.moments import RunStart, StepEnd
from ...training.observe.sink import written
from .layer_table import LayerRow, layer_rows
from .options import ProfilerConfig
from .phase_times import PhaseTimes, TimedPhases, of_ranks
from .short import short

logger = logging.getLogger(__name__)
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
OPTIMIZER = "optimizer"


class ProfiledFlops(TimedPhases):
    """--flops-profiler: FLOPs and times of a step. It times phases in place of `TimedPhases`, also for the log line."""

    def run_started(self, start: RunStart) -> None:
        """Keep what a profile has."""
        super().run_started(start)
        self._config = start.config
        self._peak = start.replica.peak_flops
        # Of the step that is profiled.
        self._profile: PhaseTimes | None = None

    def step_began(self, step: int) -> None:
        """Take another timer for the step that is profiled."""
        is_due = step - 1 == self._config.of(ProfilerConfig).flops_profiler_step
        self._profile = PhaseTimes(2, self._mesh.device) if is_due else None

    @property
    def running(self) -> PhaseTimes:
        """What times the step under way."""
        return super().running if self._profile is None else self._profile

    def step_ended(self, end: StepEnd) -> None:
        """Report the step that was profiled. Collective over the world then."""
        super().step_ended(end)
        if self._profile is None:
            return
        times = self._profile.take()
        self._times.add(times)
        self._report(times, end)

    def _report(self, times: Mapping[str, float], end: StepEnd) -> None:
        """Print the profile, or write it to the file. Collective over the world.

        times: phase → seconds of this rank
        """
        measured = of_ranks(times, 1, self._mesh.group("world"))
        if self._mesh.rank:
            return
        size = end.trained
        rows = layer_rows(
            self._config,
            size.samples,
            size.length,
            size.kept,
            each=self._config.of(ProfilerConfig).flops_profiler_detailed,
        )
        # The text: layers with their FLOPs, then phases with their times.
        ranks = self._mesh.grid.world_size
        noun = "ranks" if ranks > 1 else "rank"
        head = (
            f"FLOPs profile of step {end.step}: "
            f"{size.samples} samples of {size.length} tokens on {ranks} {noun}"
        )
        phases = phase_lines(rows, measured, end.seconds, self._peak, ranks)
        text = "\n".join([head, *layer_lines(rows), *phases])
        path = self._config.of(ProfilerConfig).flops_profiler_output_file
        if path is None:
            logger.info("%s", text)
        elif written(Path(path), text + "\n"):
            logger.info("the FLOPs profile of step %d is in %s", end.step, path)


def layer_lines(rows: Sequence[LayerRow]) -> Iterator[str]:
    """Yield the table of layers, with the sum."""
    width = max(20, *(len(row.name) for row in rows))
    parameters = sum(row.parameters for row in rows)
    flops = sum(row.forward for row in rows)
    yield f"  {'layers':{width}}{'number':>8}{'parameters':>13}{'FLOPs of forward':>27}"
    count = sum(row.count for row in rows)
    whole = LayerRow("all", count, parameters, flops, None)
    for row in (*rows, whole):
        line = f"  {row.name:{width}}{row.count:8}{short(row.parameters):>13}"
        line += _share(row.parameters, parameters)
        line += f"{short(row.forward):>10}"
        line += _share(row.forward, flops)
        yield line


def phase_lines(
    rows: Sequence[LayerRow],
    times: Mapping[str, Mapping[int, float]],
    seconds: float,
    peak: float | None,
    ranks: int,
) -> Iterator[str]:
    """Yield the times of a step and what they mean.

    times    phase → rank → seconds
    seconds  of the whole step
    peak     FLOP/s of a device, if known
    ranks    of the run
    """
    forward = sum(row.forward for row in rows)
    of_phase = {FORWARD: forward, BACKWARD: 2 * forward}
    yield f"  {'phase':20}{'largest':>13}{'smallest of all ranks':>24}{'FLOP/s of a rank':>20}"
    # The phases, of the slowest and the fastest rank; FLOPs have only forward and backward.
    for phase, name in (
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        (OPTIMIZER, "optimizer"),
    ):
        if found := list(times.get(phase, {}).values()):
            total = sum(found, 0.0)
            has_rate = phase in of_phase and total > 0
            of_rank = short(of_phase[phase] / total) if has_rate else ""
            largest = _ms(max(found))
            smallest = _ms(min(found))
            yield f"  {name:20}{largest:>13}{smallest:>24}{of_rank:>20}"
    # The whole step, whose backward has twice the FLOPs of its forward.
    rate = 3 * forward / seconds / ranks
    whole = _ms(seconds)
    yield f"  {'step':20}{whole:>13}{'':24}{short(rate):>20}"
    share = utilization(rate, peak)
    if share is not None and peak is not None:
        yield f"  model FLOPs utilization: {share:.1%} of {short(peak)}FLOP/s"
    # Recomputation is work of the device, but not of the model.
    again = [row.again for row in rows if row.again is not None]
    if len(again) < len(rows):
        yield "  FLOPs of recomputation are not counted: --recompute-num-layers sets blocks of each stage."
    elif any(again):
        with_it = rate + sum(again) / seconds / ranks
        more = short(sum(again))
        yield (
            f"  recomputation: {more}FLOPs more in backward, {short(with_it)}FLOP/s of a "
            "rank with it"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:8.1%}" if whole and part else " " * 8
