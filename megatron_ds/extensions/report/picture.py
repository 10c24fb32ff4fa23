"""Schedules as text and as pictures: SVG written by hand, PNG by matplotlib.

A picture is a list of panels, one below the other, to one scale of time, for the comparison of a plan and a
measurement. `layout` turns panels into boxes and labels with coordinates (a pure value); the two writers only
write them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path

from ...errors import ConfigError
from ...pipeline.instruction import COMPUTE, Instruction, Op, Program, Schedule
from ...pipeline.simulate import Simulation, simulate

# of a rank's first, third … stage; of the others
COLOURS = {
    Op.F: ("#4c86c6", "#9dc3ea"),
    Op.B: ("#d9822b", "#f3c48f"),
    Op.I: ("#c8574d", "#ebb3ad"),
    Op.W: ("#5a9e6f", "#a9d3b5"),
}
MEANINGS = {
    Op.F: "F forward",
    Op.B: "B backward",
    Op.I: "I backward, input half",
    Op.W: "W backward, weight half",
}
IDLE = "#eef0f2"
INK = "#22272e"
FAINT = "#8b949e"
# pixels
LEFT = 62
RIGHT = 74
TOP = 8
ROW = 24
GAP = 4
TITLE = 26
AXIS = 24
LEGEND = 26
# font size, width of a digit
SMALL = 11
LETTER = 6.6
# anchor of SVG → horizontal alignment of matplotlib
ANCHORS = {
    "start": "left",
    "middle": "center",
    "end": "right",
}


def draw(schedule: Schedule | Simulation, unit: float | None = None) -> str:
    """Return the schedule as text, a line per rank, a column per `unit` of time (default: shortest computation).

    rank 0 | F0 F1 .. .. B0 -- .. B1 --
    rank 1 | .. F0 B0 -- F1 B1 --     "--" continues, ".." is idle, F0' is of the rank's second stage
    """
    simulation = schedule if isinstance(schedule, Simulation) else simulate(schedule)
    ranks = list(zip(simulation.schedule, simulation.starts, simulation.ends))
    if unit is None:
        drawn = chain.from_iterable(zip(*rank) for rank in ranks)
        lengths = (end - start for i, start, end in drawn if i.op in COMPUTE)
        unit = min((length for length in lengths if length > 0), default=1)
    # All cells are as wide as the widest.
    rows = [_text_row(*rank, unit) for rank in ranks]
    width = max(map(len, chain.from_iterable(rows)), default=1)
    digits = len(str(len(rows) - 1))
    # One line for each rank.
    lines = []
    for rank, row in enumerate(rows):
        cells = " ".join(_text_cell(cell, width) for cell in row)
        lines.append(f"rank {rank:>{digits}} | {cells.rstrip()}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Panel:
    """A schedule with its times, below a title."""

    title: str
    timeline: Simulation


@dataclass(frozen=True)
class TimeBar:
    """A rectangle with text in its middle; a browser shows the tip under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    text: str = ""
    ink: str = "#ffffff"
    tip: str = ""

    @property
    def middle(self) -> tuple[float, float]:
        """(x, y) of its middle."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Label:
    """Text; x is at its anchor: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    ink: str = INK
    size: int = SMALL
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes and labels, in pixels from the top left."""

    width: float
    height: float
    boxes: tuple[TimeBar, ...]
    labels: tuple[Label, ...]


def layout(panels: list[Panel], width: int = 1100) -> Picture:
    """Coordinates in pixels from the top left. Boxes too narrow for their number omit it."""
    # One scale of time for all panels, which fills the width.
    spans = [panel.timeline.span for panel in panels]
    span = max(spans, default=0) or 1
    scale = (width - LEFT - RIGHT) / span
    boxes: list[TimeBar] = []
    labels: list[Label] = []
    # Panels, then the axis and the legend below them.
    y: float = TOP
    for panel in panels:
        labels.append(Label(LEFT, y + 14, panel.title, size=13, bold=True))
        y = _rows(panel.timeline, y + TITLE, scale, boxes, labels)
    _axis(span, scale, y, boxes, labels)
    y += AXIS
    ops: set[Op] = set()
    has_chunks = False
    for panel in panels:
        for program in panel.timeline.schedule:
            ops |= {i.op for i in program}
            stages = {i.stage for i in program}
            has_chunks = has_chunks or len(stages) > 1
    _legend(ops, has_chunks, y, boxes, labels)
    return Picture(width, y + LEGEND, tuple(boxes), tuple(labels))


def svg(panels: list[Panel], width: int = 1100) -> str:
    """Return the picture as the text of an SVG file."""
    picture = layout(panels, width)
    # The head: the size of the canvas, and the style that all numbers share.
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width:g}" height="{picture.height:g}" '
        f'viewBox="0 0 {picture.width:g} {picture.height:g}" font-family="DejaVu Sans, Helvetica, '
        'Arial, sans-serif">',
        f"<style>.n{{font-size:{SMALL}px;text-anchor:middle;pointer-events:none}}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    # Boxes first, so that labels lie above them.
    for box in picture.boxes:
        tip = ""
        if box.tip:
            tip = f"<title>{escape(box.tip)}</title>"
        lines.append(
            f'<rect x="{box.x:.1f}" y="{box.y:g}" width="{box.width:.1f}" height="{box.height:g}" '
            f'fill="{box.colour}">{tip}</rect>'
        )
        if box.text:
            x, y = box.middle
            lines.append(
                f'<text x="{x:.1f}" y="{y + 4:g}" class="n" '
                f'fill="{box.ink}">{escape(box.text)}</text>'
            )
    for label in picture.labels:
        weight = ""
        if label.bold:
            weight = ' font-weight="bold"'
        lines.append(
            f'<text x="{label.x:.1f}" y="{label.y:g}" font-size="{label.size}" text-anchor="{label.anchor}" '
            f'fill="{label.ink}"{weight}>{escape(label.text)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def save_png(
    panels: list[Panel], path: Path, width: int = 1100, dots: float = 2.0
) -> None:
    """The picture as a PNG, `dots` dots a pixel. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "writing a PNG needs matplotlib, which is not installed: pip install matplotlib. "
            "Or write an .svg, which needs no package."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    # The canvas: points per pixel at 96 pixels per inch, and y downwards.
    picture = layout(panels, width)
    points = 0.75
    inches = (picture.width / 96, picture.height / 96)
    figure = plt.figure(figsize=inches, dpi=96 * dots)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    # Boxes first, so that labels lie above them.
    for box in picture.boxes:
        rectangle = Rectangle(
            (box.x, box.y),
            box.width,
            box.height,
            facecolor=box.colour,
            linewidth=0,
        )
        axes.add_patch(rectangle)
        if box.text:
            axes.text(
                *box.middle,
                box.text,
                color=box.ink,
                fontsize=SMALL * points,
                ha="center",
                va="center_baseline",
            )
    for label in picture.labels:
        axes.text(
            label.x,
            label.y,
            label.text,
            color=label.ink,
            fontsize=label.size * points,
            va="baseline",
            ha=ANCHORS[label.anchor],
            weight="bold" if label.bold else "normal",
        )
    # The file is the canvas, without margins.
    figure.savefig(path, dpi=96 * dots)
    plt.close(figure)


def _rows(
    timeline: Simulation,
    y: float,
    scale: float,
    boxes: list[TimeBar],
    labels: list[Label],
) -> float:
    """One row per rank, with its peak of live activations behind it; returns the y below."""
    length = timeline.span * scale
    behind = LEFT + length + 8
    labels.append(Label(behind, y - 5, "peak alive", ink=FAINT, size=10))
    ranks = zip(timeline.schedule, timeline.starts, timeline.ends)
    for rank, (program, starts, ends) in enumerate(ranks):
        # An idle bar for the whole time lies below the computations.
        middle = y + ROW / 2 + 4
        labels.append(Label(LEFT - 8, middle, f"rank {rank}", anchor="end"))
        boxes.append(TimeBar(LEFT, y, length, ROW, IDLE))
        stages = sorted({i.stage for i in program})
        for i, start, end in zip(program, starts, ends):
            if i.op in COMPUTE:
                later = stages.index(i.stage) % 2
                bar = _bar(i, start, end, scale, y, later)
                boxes.append(bar)
        peak = str(timeline.peak_live[rank])
        labels.append(Label(behind, middle, peak, ink=FAINT))
        y += ROW + GAP
    return y + GAP


def _bar(
    i: Instruction, start: float, end: float, scale: float, y: float, later: int
) -> TimeBar:
    """Return the bar of a computation. later: 1 for every second stage of the rank, in pale colours, else 0."""
    wide = (end - start) * scale
    number = str(i.microbatch)
    has_room = wide >= LETTER * len(number) + 3
    gap = 0.8 if wide > 3 else 0
    return TimeBar(
        x=LEFT + start * scale,
        y=y,
        width=max(wide - gap, 0.4),
        height=ROW,
        colour=COLOURS[i.op][later],
        text=number if has_room else "",
        ink=INK if later else "#ffffff",
        tip=f"{i}: {start:.6g} to {end:.6g}",
    )


def _axis(
    span: float, scale: float, y: float, boxes: list[TimeBar], labels: list[Label]
) -> None:
    """The axis of time, with about ten marks at round numbers."""
    boxes.append(TimeBar(LEFT, y, span * scale, 0.8, FAINT))
    step = _round_step(span / 10)
    marks = int(span / step + 1e-9)
    for n in range(marks + 1):
        at = n * step
        x = LEFT + at * scale
        boxes.append(TimeBar(x - 0.4, y, 0.8, 4, FAINT))
        labels.append(Label(x, y + 16, f"{at:g}", "middle", FAINT, size=10))
    labels.append(Label(LEFT - 8, y + 16, "time", anchor="end", ink=FAINT, size=10))


def _legend(
    ops: set[Op],
    has_chunks: bool,
    y: float,
    boxes: list[TimeBar],
    labels: list[Label],
) -> None:
    """Colours with their meanings in one line, and a note behind them."""
    present = [op for op in MEANINGS if op in ops]
    entries = [(COLOURS[op][0], MEANINGS[op]) for op in present]
    entries.append((IDLE, "idle"))
    x: float = LEFT
    for colour, meaning in entries:
        boxes.append(TimeBar(x, y + 6, 14, 12, colour))
        labels.append(Label(x + 20, y + 16, meaning))
        x += 36 + LETTER * len(meaning)
    note = "numbers are micro-batches"
    if has_chunks:
        note += "; pale: every second stage of a rank"
    labels.append(Label(x, y + 16, note, ink=FAINT))


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and not less than `least`."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 1.0
    while power > least:
        power /= 10
    # A step that is less by rounding alone counts as enough.
    enough = least * (1 - 1e-9)
    steps = (factor * power for factor in (1, 2, 5, 10))
    return next(step for step in steps if step >= enough)


def _text_row(
    program: Program, starts: Sequence[float], ends: Sequence[float], unit: float
) -> list[str]:
    """Return the cells of a rank: a name where a computation begins, "-" where it continues, "." where it is idle."""
    stages = sorted({i.stage for i in program})
    row: list[str] = []
    for i, start, end in zip(program, starts, ends):
        if i.op not in COMPUTE:
            continue
        # Each computation has a column at least; a stage is marked by its place among those of the rank.
        first = round(start / unit)
        stop = max(round(end / unit), first + 1)
        primes = "'" * stages.index(i.stage)
        row += ["."] * (first - len(row))
        row.append(f"{i.op}{i.microbatch}{primes}")
        row += ["-"] * (stop - first - 1)
    return row


def _text_cell(text: str, width: int) -> str:
    """Return a cell of this width, filled with its mark or with blanks."""
    return text * width if text in (".", "-") else text.ljust(width)
