"""Schedules as pictures: SVG written by hand, PNG by matplotlib. A picture is a list of panels, one below the other, to one
scale of time, so that a plan can be laid beside what was measured.

`layout` turns panels into boxes and words at places (a pure value); the two writers only put them down.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..errors import ConfigError
from .instruction import Op
from .passes import COMPUTE
from .simulate import Simulation

COLOURS = {Op.F: ("#4c86c6", "#9dc3ea"), Op.B: ("#d9822b", "#f3c48f"),             # a rank's first, third … stage; the others
           Op.I: ("#c8574d", "#ebb3ad"), Op.W: ("#5a9e6f", "#a9d3b5")}
MEANINGS = {Op.F: "F forward", Op.B: "B backward", Op.I: "I backward, input half", Op.W: "W backward, weight half"}
IDLE, INK, FAINT = "#eef0f2", "#22272e", "#8b949e"
LEFT, RIGHT, TOP, ROW, GAP, TITLE, AXIS, LEGEND = 62, 74, 8, 24, 4, 26, 24, 26         # pixels
SMALL, LETTER = 11, 6.6                                                                # font size, width of a digit


@dataclass(frozen=True)
class Panel:
    title: str
    timeline: Simulation


@dataclass(frozen=True)
class Box:
    """A rectangle with a word in its middle; the tip is what a browser shows under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    text: str = ""
    ink: str = "#ffffff"
    tip: str = ""


@dataclass(frozen=True)
class Word:
    """Text; anchor is where x is: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    ink: str = INK
    size: int = SMALL
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    boxes: tuple[Box, ...]
    words: tuple[Word, ...]


def layout(panels: list[Panel], width: int = 1100) -> Picture:
    """Places of everything, in pixels from the top left. Boxes too narrow for their number go without."""
    span = max((panel.timeline.span for panel in panels), default=0) or 1
    scale = (width - LEFT - RIGHT) / span
    boxes: list[Box] = []
    words: list[Word] = []
    y = TOP
    for panel in panels:
        words.append(Word(LEFT, y + 14, panel.title, size=13, bold=True))
        y = _rows(panel.timeline, y + TITLE, scale, boxes, words)
    _axis(span, scale, y, boxes, words)
    y += AXIS
    programs = [program for panel in panels for program in panel.timeline.schedule]
    has_chunks = any(len({i.stage for i in program}) > 1 for program in programs)
    _legend({i.op for program in programs for i in program}, has_chunks, y, boxes, words)
    return Picture(width, y + LEGEND, tuple(boxes), tuple(words))


def svg(panels: list[Panel], width: int = 1100) -> str:
    """The picture as the text of an SVG file."""
    picture = layout(panels, width)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width:g}" height="{picture.height:g}" '
             f'viewBox="0 0 {picture.width:g} {picture.height:g}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif">',
             f"<style>.n{{font-size:{SMALL}px;text-anchor:middle;pointer-events:none}}</style>",
             '<rect width="100%" height="100%" fill="#ffffff"/>']
    for box in picture.boxes:
        tip = f"<title>{escape(box.tip)}</title>" if box.tip else ""
        lines.append(f'<rect x="{box.x:.1f}" y="{box.y:g}" width="{box.width:.1f}" height="{box.height:g}" '
                     f'fill="{box.colour}">{tip}</rect>')
        if box.text:
            lines.append(f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + box.height / 2 + 4:g}" class="n" '
                         f'fill="{box.ink}">{escape(box.text)}</text>')
    for word in picture.words:
        weight = ' font-weight="bold"' if word.bold else ""
        lines.append(f'<text x="{word.x:.1f}" y="{word.y:g}" font-size="{word.size}" text-anchor="{word.anchor}" '
                     f'fill="{word.ink}"{weight}>{escape(word.text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def save_png(panels: list[Panel], path: Path, width: int = 1100, dots: float = 2.0) -> None:
    """The picture as a PNG, `dots` dots a pixel. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("writing a PNG needs matplotlib, which is not installed: pip install matplotlib. Or write "
                          "an .svg, which needs no package.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    picture, points = layout(panels, width), 0.75                          # of a pixel at 96 to the inch
    figure = plt.figure(figsize=(picture.width / 96, picture.height / 96), dpi=96 * dots)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    for box in picture.boxes:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.colour, linewidth=0))
        if box.text:
            axes.text(box.x + box.width / 2, box.y + box.height / 2, box.text, color=box.ink, fontsize=SMALL * points,
                      ha="center", va="center_baseline")
    for word in picture.words:
        axes.text(word.x, word.y, word.text, color=word.ink, fontsize=word.size * points, va="baseline",
                  ha={"start": "left", "middle": "center", "end": "right"}[word.anchor],
                  weight="bold" if word.bold else "normal")
    figure.savefig(path, dpi=96 * dots)
    plt.close(figure)


def _rows(timeline: Simulation, y: float, scale: float, boxes: list[Box], words: list[Word]) -> float:
    """One row per rank, with its peak of live activations behind it; returns where the next thing goes."""
    words.append(Word(LEFT + timeline.span * scale + 8, y - 5, "peak alive", ink=FAINT, size=10))
    for rank, (program, starts, ends) in enumerate(zip(timeline.schedule, timeline.starts, timeline.ends)):
        words.append(Word(LEFT - 8, y + ROW / 2 + 4, f"rank {rank}", anchor="end"))
        boxes.append(Box(LEFT, y, timeline.span * scale, ROW, IDLE))
        stages = sorted({i.stage for i in program})
        for i, start, end in zip(program, starts, ends):
            if i.op in COMPUTE:
                wide = (end - start) * scale
                number = str(i.microbatch) if wide >= LETTER * len(str(i.microbatch)) + 3 else ""
                later = stages.index(i.stage) % 2
                boxes.append(Box(LEFT + start * scale, y, max(wide - (0.8 if wide > 3 else 0), 0.4), ROW, COLOURS[i.op][later],
                                 number, INK if later else "#ffffff", f"{i}: {start:.6g} to {end:.6g}"))
        words.append(Word(LEFT + timeline.span * scale + 8, y + ROW / 2 + 4, str(timeline.peak_live[rank]), ink=FAINT))
        y += ROW + GAP
    return y + GAP


def _axis(span: float, scale: float, y: float, boxes: list[Box], words: list[Word]) -> None:
    boxes.append(Box(LEFT, y, span * scale, 0.8, FAINT))
    step = _round_step(span / 10)
    for n in range(int(span / step + 1e-9) + 1):
        boxes.append(Box(LEFT + n * step * scale - 0.4, y, 0.8, 4, FAINT))
        words.append(Word(LEFT + n * step * scale, y + 16, f"{n * step:g}", anchor="middle", ink=FAINT, size=10))
    words.append(Word(LEFT - 8, y + 16, "time", anchor="end", ink=FAINT, size=10))


def _legend(ops: set[Op], has_chunks: bool, y: float, boxes: list[Box], words: list[Word]) -> None:
    x = LEFT
    entries = [(COLOURS[op][0], meaning) for op, meaning in MEANINGS.items() if op in ops] + [(IDLE, "idle")]
    for colour, meaning in entries:
        boxes.append(Box(x, y + 6, 14, 12, colour))
        words.append(Word(x + 20, y + 16, meaning))
        x += 36 + LETTER * len(meaning)
    note = "numbers are micro-batches" + ("; pale: every second stage of a rank" if has_chunks else "")
    words.append(Word(x, y + 16, note, ink=FAINT))


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and not less than `least`."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
