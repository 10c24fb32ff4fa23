"""The report as one HTML file without references to other files: values of runs in the template `page.html`.

The template escapes every text; what is HTML already, the pictures, is marked so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...version import __version__
from .drawing import CHARTS, COLOURS, chart, colour
from .drawing import curves as lines
from .expert_load import COLUMNS, LABELS, Points, curves, values_of
from .goodput import PARTS, Goodput, goodput
from .paragraph import paragraph
from .pipeline_time import PipelineTime, pipeline_time, trace_folder
from .recorded_run import Run, titles
from .reduction import Number, RunNumbers, differences, rows

PART_COLOURS = dict(
    zip(
        PARTS,
        "#009e73 #d55e00 #e69f00 #56b4e9 #f0e442 #0072b2 #cc79a7 #999999 #dddddd".split(),
        strict=True,
    )
)
MIB = 2**20
SECONDS = "{:.4g} s"
SHARE = "{:.1%}"


def page(runs: Sequence[Run]) -> str:
    """Return the whole file."""
    names = titles([run.name for run in runs])
    shown = [Shown(*values) for values in zip(range(len(runs)), names, runs)]
    with_settings = [run for run in shown if run.run.settings]
    return _template().render(
        runs=shown,
        title=" and ".join(names) if len(names) < 3 else ", ".join(names),
        charts={title: chart(title, runs) for title in CHARTS},
        numbers=list(rows(runs)),
        parts=PARTS,
        part_colours=PART_COLOURS,
        number_of_colours=len(COLOURS),
        differences=differences([run.run for run in with_settings]),
        compared=with_settings,
        environments=sorted({name for run in runs for name in run.environment}),
        version=__version__,
    )


def _template() -> Any:
    """Return the template, with the functions that it calls."""
    # torch needs jinja2, so it is there. It takes a tenth of a second to load.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = Markup
    return environment.get_template("page.html")


@dataclass(frozen=True)
class Shown:
    """A run in the page. number: its place among the runs, which gives its colour; title: its heading"""

    number: int
    title: str
    run: Run

    @property
    def colour(self) -> int:
        """The number of its colour."""
        return self.number % len(COLOURS)

    @cached_property
    def spent(self) -> Goodput:
        """How its wall time was spent."""
        return goodput(self.run)

    @property
    def paragraph(self) -> str:
        """The run in a few sentences."""
        return paragraph(self.run, self.spent)

    # ------------------------------------------------------------------ what a run records on request
    @property
    def trace(self) -> Path | None:
        """The folder of --trace; None without one."""
        return trace_folder(self.run)

    @cached_property
    def pipeline(self) -> PipelineTime | None:
        """The last recorded step of --trace."""
        return None if self.trace is None else pipeline_time(self.trace)

    @property
    def step_times(self) -> list[RunNumbers]:
        """The step of `pipeline`, planned and measured: ranks follow, since an uneven load shows only there."""
        if self.pipeline is None:
            return []
        both = (self.pipeline.planned, self.pipeline.measured)
        found = [
            RunNumbers("span", "step", SECONDS, [times.span for times in both]),
            RunNumbers("bubble", "bubble", SHARE, [times.bubble for times in both]),
        ]
        for rank, busy in enumerate(zip(*(times.busy for times in both))):
            found.append(
                RunNumbers(f"busy-{rank}", f"rank {rank} computes", SECONDS, [*busy])
            )
        return found

    @property
    def memory(self) -> list[RunNumbers]:
        """MiB by owner, planned and measured, of --record-memory-history; empty without it."""
        records = [r for r in self.run.records if r["kind"] == "memory"]
        if not records:
            return []
        planned = records[-1]["planned"]
        measured = records[-1]["measured"]
        found = {owner: (planned[owner], measured[owner]) for owner in planned}
        found["all"] = (sum(planned.values()), sum(measured.values()))
        return [
            RunNumbers(
                f"bytes-{owner}", owner, "{:,.2f}", [count / MIB for count in counts]
            )
            for owner, counts in found.items()
        ]

    @cached_property
    def expert_curves(self) -> dict[str, dict[int, Points]]:
        """Metric → layer → its points; empty for a model without experts."""
        return curves(self.run)

    @property
    def expert_charts(self) -> dict[str, str]:
        """Title → picture. Layers share a picture, so that one that differs is seen."""
        found = {}
        for metric, of_layers in self.expert_curves.items():
            drawn = []
            for place, layer in enumerate(sorted(of_layers)):
                steps, values = zip(*of_layers[layer])
                style = dict(color=colour(place), linewidth=1.2, label=f"layer {layer}")
                drawn.append((steps, values, style))
            title = LABELS[metric]
            found[title] = lines(f"{title} of run {self.number}", drawn)
        return found

    @property
    def expert_heads(self) -> list[str]:
        """Headings of the columns that the layers have."""
        return [head for head in COLUMNS if COLUMNS[head][0] in self.expert_curves]

    def of_layer(self, layer: int, head: str) -> RunNumbers:
        """Return the number of a layer in a column, at the end of the run."""
        metric, form, reduce = COLUMNS[head]
        points = self.expert_curves[metric][layer]
        value: Number = reduce(values_of(points))
        name = f"{head.replace(', ', '-')}-{layer}"
        return RunNumbers(name, head, form, [value])
