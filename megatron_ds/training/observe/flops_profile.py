"""The FLOPs profile of a step, and the numbers that an autotuner reads after a few steps.

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

import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config import RunConfig
from ...mpu.mesh import Mesh
from ...planning.flops import utilization
from ...planning.layer_table import LayerRow, layer_rows
from .phase_times import PhaseTimes, of_ranks
from .sink import reason_of

logger = logging.getLogger(__name__)
METRIC_FILE = "autotuning_metric.json"
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class StepSize:
    """What a step has trained on.

    samples   sequences, over all ranks;  length: tokens of each
    kept      tokens of a sequence that the blocks see which drop some; None: all
    """

    samples: int
    length: int
    kept: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of whole sequences."""
        return self.samples * self.length


class FlopsProfiler:
    """Times and reports the steps that the options ask for. peak: of a rank's device, FLOP/s, if known."""

    def __init__(self, config: RunConfig, mesh: Mesh, peak: float | None):
        self.config = config
        self.mesh = mesh
        self._peak = peak
        self._tuned: list[
            tuple[float, float]
        ] = []  # (seconds, FLOPs of all ranks) of steps

    def times(self, done: int) -> PhaseTimes | None:
        """A timer for the step that follows `done` steps; None if it is not profiled."""
        wanted = self.config.profiler
        is_due = wanted.flops_profiler and done == wanted.flops_profiler_step
        return PhaseTimes(2, self.mesh.device) if is_due else None

    def report(
        self, times: Mapping[str, float], step: int, size: StepSize, seconds: float
    ) -> None:
        """Print the profile of a step, or write it to the file. Collective over the world.

        times: phase → seconds of this rank; seconds: of the whole step
        """
        measured = of_ranks(times, 1, self.mesh.group("world"))
        if self.mesh.rank:
            return
        rows = layer_rows(
            self.config,
            size.samples,
            size.length,
            size.kept,
            each=self.config.profiler.flops_profiler_detailed,
        )
        # The text: layers with their FLOPs, then phases with their times.
        ranks = self.mesh.grid.world_size
        head = (
            f"FLOPs profile of step {step}: {size.samples} samples of {size.length} tokens on "
            f"{ranks} rank{'s' if ranks > 1 else ''}"
        )
        phases = phase_lines(rows, measured, seconds, self._peak, ranks)
        text = "\n".join([head, *layer_lines(rows), *phases])
        path = self.config.profiler.flops_profiler_output_file
        if path is None:
            logger.info("%s", text)
        elif _written(Path(path), text + "\n"):
            logger.info("the FLOPs profile of step %d is in %s", step, path)

    def count(self, done: int, seconds: float, flops: float) -> bool:
        """Count a finished step, of which `done` are complete; whether an autotuner's run ends with it. Its
        numbers are then in the file."""
        wanted = self.config.profiler
        if not wanted.autotuning:
            return False
        if done > wanted.autotuning_start_step:
            self._tuned.append((seconds, flops))
        if done < wanted.autotuning_end_step + 1:
            return False
        if self.mesh.rank == 0:
            path = Path(wanted.autotuning_metric_path or METRIC_FILE)
            numbers = tuned_numbers(
                self._tuned,
                self.config.train.global_batch_size,
                self.mesh.grid.world_size,
            )
            if _written(path, json.dumps(numbers) + "\n"):
                logger.info("autotuning: %s, written to %s", numbers, path)
        return True


def tuned_numbers(
    steps: Sequence[tuple[float, float]], samples: int, ranks: int
) -> dict[str, float]:
    """The numbers by DeepSpeed's names, in ms, samples per second and FLOP/s of a rank.

    steps: (seconds, FLOPs of all ranks) of each; at least one. samples: of a step
    """
    seconds = statistics.fmean(step[0] for step in steps)
    return {
        "latency": seconds * 1000,
        "throughput": samples / seconds,
        "FLOPS_per_gpu": statistics.fmean(step[1] for step in steps) / seconds / ranks,
    }


def layer_lines(rows: Sequence[LayerRow]) -> Iterator[str]:
    """The table of layers, with the sum."""
    width = max(20, *(len(row.name) for row in rows))
    parameters = sum(row.parameters for row in rows)
    flops = sum(row.forward for row in rows)
    yield f"  {'layers':{width}}{'number':>8}{'parameters':>13}{'FLOPs of forward':>27}"
    for row in (
        *rows,
        LayerRow("all", sum(row.count for row in rows), parameters, flops, None),
    ):
        yield (
            f"  {row.name:{width}}{row.count:8}{short(row.parameters):>13}"
            f"{_share(row.parameters, parameters)}{short(row.forward):>10}{_share(row.forward, flops)}"
        )


def phase_lines(
    rows: Sequence[LayerRow],
    times: Mapping[str, Mapping[int, float]],
    seconds: float,
    peak: float | None,
    ranks: int,
) -> Iterator[str]:
    """The times of a step and what they mean. times: phase → rank → seconds."""
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
            rate = (
                short(of_phase[phase] / sum(found))
                if phase in of_phase and sum(found)
                else ""
            )
            yield f"  {name:20}{_ms(max(found)):>13}{_ms(min(found)):>24}{rate:>20}"
    # The whole step, whose backward has twice the FLOPs of its forward.
    rate = 3 * forward / seconds / ranks
    yield f"  {'step':20}{_ms(seconds):>13}{'':24}{short(rate):>20}"
    share = utilization(rate, peak)
    if share is not None:
        yield f"  model FLOPs utilization: {share:.1%} of {short(peak)}FLOP/s"
    # Recomputation is work of the device, but not of the model.
    again = [row.again for row in rows]
    if None in again:
        yield "  FLOPs of recomputation are not counted: --recompute-num-layers sets blocks of each stage."
    elif any(again):
        with_it = rate + sum(again) / seconds / ranks
        yield (
            f"  recomputation: {short(sum(again))}FLOPs more in backward, {short(with_it)}FLOP/s of a "
            "rank with it"
        )


def short(number: float) -> str:
    """A count with three digits and its unit: 1.31 G."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:8.1%}" if whole and part else " " * 8


def _written(path: Path, text: str) -> bool:
    """Whether the file could be written; otherwise the text is in the log, and the run continues."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.warning("cannot write %s: %s. It had:", path, reason_of(error))
        logger.warning("%s", text)
        return False
    return True
