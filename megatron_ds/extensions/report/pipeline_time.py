"""The pipeline of a run in time: a step that --trace recorded, beside its plan."""

from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ...pipeline.instruction import COMPUTE, Schedule
from ...pipeline.passes import add_transfers
from ...pipeline.simulate import Simulation, simulate
from .picture import Panel, svg
from .recorded_run import Run
from .trace_files import as_simulation, read_traces, steps_of, typical_cost

PIXELS = 760  # of the picture, which a narrower window scrolls


@dataclass(frozen=True)
class PipelineTime:
    """The last recorded step. planned: the same order, with the median times and transfers that take none."""

    planned: Simulation
    measured: Simulation

    def picture(self) -> str:
        """Return an <svg> element with both, to one scale of time."""
        panels = [
            Panel(f"{name}: bubble {times.bubble:.1%}, {times.span:.4g} s", times)
            for name, times in (("planned", self.planned), ("measured", self.measured))
        ]
        text = svg(panels, PIXELS)
        return text.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)


def trace_folder(run: Run) -> Path | None:
    """Return the folder of --trace, as the run was given it; None without one."""
    setting = run.settings.get("logging.trace")
    return Path(setting[0]) if setting else None


def pipeline_time(folder: Path) -> PipelineTime | None:
    """Return the last step of the timelines in the folder; None if there is none. Raises DataError for other
    files.
    """
    steps = steps_of(read_traces(sorted(folder.glob("*.json"))))
    if not steps:
        return None
    timelines = steps[-1]
    if not all(timelines.values()):
        raise DataError(
            f"{folder}: a pipeline rank has no instructions in the last step. Remove the files of other runs."
        )
    measured = as_simulation(timelines)
    order = _computations(measured)
    stages = {i.stage for program in order for i in program}
    transfers = add_transfers(order, len(stages))
    return PipelineTime(simulate(transfers, typical_cost(timelines)), measured)


def _computations(times: Simulation) -> Schedule:
    return tuple(
        tuple(i for i in program if i.op in COMPUTE) for program in times.schedule
    )
