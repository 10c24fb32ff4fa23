"""The report as one HTML file without references to other files. Texts of runs are escaped."""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from ...version import __version__
from .drawing import CHARTS, chart, colour
from .drawing import curves as lines
from .expert_load import COLUMNS, LABELS, curves, values_of
from .goodput import PARTS, goodput
from .pipeline_time import pipeline_time, trace_folder
from .recorded_run import Run
from .reduction import NUMBERS, Number, differences

CSS = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; background: #fff; margin: 0 auto; max-width: 1200px;
  padding: 0 12px 40px; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin: 1.8rem 0 .5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; margin-bottom: 12px; } table { border-collapse: collapse; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
section > div, th, td { overflow-wrap: anywhere; } th { min-width: 6em; }
td:first-child { overflow-wrap: normal; } td.number { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
td.name { white-space: nowrap; } .least { min-width: 640px; }
.bar { display: flex; height: 18px; border-radius: 3px; overflow: hidden; margin: 6px 0; background: #eee; }
p.note { color: #555; margin: .3rem 0; }
"""
PART_COLOURS = dict(
    zip(
        PARTS,
        "#009e73 #d55e00 #e69f00 #56b4e9 #f0e442 #0072b2 #cc79a7 #999999 #dddddd".split(),
        strict=True,
    )
)
SECONDS = "{:,.1f} s"
SECONDS_OF_STEP = "{:.4g} s"
MIB = 2**20
BOTH = ("planned", "measured")
SHARE = "{:.1%}"
NOT_RECORDED = '<p class="note">Not recorded by this run.</p>'


def page(runs: Sequence[Run]) -> str:
    """Return the whole file."""
    # Parts that a run does not have are empty and are left out.
    title = "Report of " + ", ".join(run.name for run in runs)
    sections = {
        "Runs": _names(runs),
        "Curves": _charts(runs),
        "Numbers": _numbers(runs),
        "Wall time": _of_each(_wall_time, runs),
        "Pipeline": _where_recorded(_pipeline, runs),
        "Memory": _where_recorded(_memory, runs),
        "Experts": _where_recorded(_experts, runs),
        "Settings that differ": _differences(runs),
        "Settings": _of_each(_settings, runs),
        "Environment": _of_each(_environment, runs),
    }
    if len(runs) == 1:
        del sections["Settings that differ"]
    body = [
        f"<section><h2>{heading}</h2>\n{content}</section>"
        for heading, content in sections.items()
        if content
    ]
    # The file needs no other file and no network.
    lines = (
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{CSS}</style></head>",
        "<body><h1>Report</h1>",
        *body,
        f'<p class="note">megatron_ds {__version__}</p>',
        "</body></html>",
        "",
    )
    return "\n".join(lines)


def _of_each(part: Callable[[int, Run], str], runs: Sequence[Run]) -> str:
    pieces = []
    for number, run in enumerate(runs):
        pieces.append(f"<div>{_name(number, run)}</div>")
        pieces.append(part(number, run))
    return "\n".join(pieces)


def _where_recorded(part: Callable[[int, Run], str], runs: Sequence[Run]) -> str:
    """Return the part of each run that has it; "" if no run does."""
    found = []
    for number, run in enumerate(runs):
        content = part(number, run)
        found.append(content)
    if not any(found):
        return ""
    shown = lambda number, run: found[number] or NOT_RECORDED
    return _of_each(shown, runs)


def _names(runs: Sequence[Run]) -> str:
    return _of_each(lambda number, run: "", runs)


def _name(number: int, run: Run) -> str:
    return _swatch(colour(number)) + escape(run.name)


def _swatch(filling: str) -> str:
    return f'<span class="swatch" style="background:{filling}"></span>'


def _charts(runs: Sequence[Run]) -> str:
    figures = []
    for title in CHARTS:
        svg = chart(title, runs)
        if svg is not None:
            caption = f"<figcaption>{title}</figcaption>"
            figures.append(f"<figure>{caption}{svg}</figure>")
    drawn = "".join(figures)
    note = "Lines: training. Circles: validation. Squares: test."
    return f'<div class="charts">{drawn}</div><p class="note">{note}</p>'


# ------------------------------------------------------------------ tables
def _numbers(runs: Sequence[Run]) -> str:
    rows = []
    for name, (label, form, reduce) in NUMBERS.items():
        values = [reduce(run) for run in runs]
        if any(value is not None for value in values):
            row = [f"<td>{label}</td>"]
            for number, value in enumerate(values):
                row.append(_cell(number, name, value, form))
            rows.append(row)
    names = [_name(number, run) for number, run in enumerate(runs)]
    return _table(["", *names], rows)


def _wall_time(number: int, run: Run) -> str:
    """Return a sentence, a bar and a table of the parts of its wall time."""
    spent = goodput(run)
    wall = _value("span", number, "wall", spent.wall, SECONDS)
    share = _value("span", number, "explained", spent.explained, SHARE)
    rows = []
    for part, seconds in spent.parts.items():
        of_wall = seconds / spent.wall if spent.wall > 0 else None
        row = (
            f"<td>{_swatch(PART_COLOURS[part])}{part}</td>",
            _cell(number, f"seconds-{part}", seconds, SECONDS),
            _cell(number, f"share-{part}", of_wall, SHARE),
        )
        rows.append(row)
    return "\n".join(
        (
            f"<div>{wall}, of which {share} are explained</div>",
            _bar(spent.parts),
            _table(["", "time", "share"], rows),
        )
    )


def _bar(parts: dict[str, float]) -> str:
    pieces = []
    for part, seconds in parts.items():
        if seconds > 0:
            style = f"flex:{seconds:.6f} 0 0;background:{PART_COLOURS[part]}"
            pieces.append(f'<span style="{style}"></span>')
    return f'<div class="bar">{"".join(pieces)}</div>'


# ------------------------------------------------------------------ what a run records on request
def _pipeline(number: int, run: Run) -> str:
    """Return a step in time, planned and measured; "" without --trace."""
    folder = trace_folder(run)
    if folder is None:
        return ""
    found = pipeline_time(folder)
    if found is None:
        where = escape(str(folder))
        return f'<p class="note">No timelines of a step are in {where}.</p>'
    # Ranks follow, since an uneven load shows only there.
    both = (found.planned, found.measured)
    spans = [times.span for times in both]
    bubbles = [times.bubble for times in both]
    rows = [
        _beside(number, "step", "span", spans, SECONDS_OF_STEP),
        _beside(number, "bubble", "bubble", bubbles, SHARE),
    ]
    ranks = zip(*(times.busy for times in both))
    for rank, busy in enumerate(ranks):
        title = f"rank {rank} computes"
        row = _beside(number, title, f"busy-{rank}", busy, SECONDS_OF_STEP)
        rows.append(row)
    note = (
        "The last step of --trace. Planned: the same order of computations, each with its median time; "
        "transfers take none."
    )
    picture = found.picture()
    table = _table(["", *BOTH], rows)
    return (
        f'<div class="wide"><div class="least">{picture}</div></div>'
        f'{table}<p class="note">{note}</p>'
    )


def _beside(
    run: int, title: str, name: str, values: Sequence[float], form: str
) -> list[str]:
    """Return a row of a planned and a measured value."""
    row = [f'<td class="name">{escape(title)}</td>']
    for which, value in zip(BOTH, values, strict=True):
        cell = _cell(run, f"{name}-{which}", value, form)
        row.append(cell)
    return row


def _memory(number: int, run: Run) -> str:
    """Bytes by owner; "" without --record-memory-history."""
    records = [record for record in run.records if record["kind"] == "memory"]
    if not records:
        return ""
    newest = records[-1]
    counts = [newest[which] for which in BOTH]
    rows = []
    for owner in counts[0]:
        values = [count[owner] / MIB for count in counts]
        row = _beside(number, owner, f"bytes-{owner}", values, "{:,.2f}")
        rows.append(row)
    sums = [sum(count.values()) / MIB for count in counts]
    last = _beside(number, "all", "bytes-all", sums, "{:,.2f}")
    rows.append(last)
    note = "Activations: with what the running layer needs, at most, in the second step of the process."
    table = _table(["MiB of rank 0", *BOTH], rows)
    return f'{table}<p class="note">{note}</p>'


def _experts(number: int, run: Run) -> str:
    """Curves and a table of the layers with experts; "" without any."""
    metrics = curves(run)
    if not metrics:
        return ""
    # Layers share a chart, so that one that differs is seen.
    figures = []
    for metric, of_layers in metrics.items():
        drawn = []
        for place, layer in enumerate(sorted(of_layers)):
            steps, values = zip(*of_layers[layer])
            style = {
                "color": colour(place),
                "linewidth": 1.2,
                "label": f"layer {layer}",
            }
            curve = (steps, values, style)
            drawn.append(curve)
        title = LABELS[metric]
        svg = lines(f"{title} of run {number}", drawn)
        figure = f"<figure><figcaption>{title}</figcaption>{svg}</figure>"
        figures.append(figure)
    # The table has the numbers at the end of the run.
    heads = [head for head, column in COLUMNS.items() if column[0] in metrics]
    rows = []
    for layer in sorted(metrics["max_load"]):
        row = [f'<td class="name">layer {layer}</td>']
        for head in heads:
            metric, form, reduce = COLUMNS[head]
            points = metrics[metric][layer]
            value = reduce(values_of(points))
            name = head.replace(", ", "-")
            cell = _cell(number, f"{name}-{layer}", value, form)
            row.append(cell)
        rows.append(row)
    note = "Load: slots of the most wanted expert relative to the mean; 1 is even. Entropy of the router in nats."
    charts = "".join(figures)
    table = _table(["", *heads], rows)
    return f'<div class="charts">{charts}</div>{table}<p class="note">{note}</p>'


def _differences(runs: Sequence[Run]) -> str:
    """Return a row for each option that differs. Runs that did not record their settings are left out."""
    recorded = {number: run for number, run in enumerate(runs) if run.settings}
    found = differences(list(recorded.values()))
    if not found:
        return '<p class="note">None.</p>'
    rows = []
    for path, values in found.items():
        texts = ["default" if value is None else value for value in values]
        rows.append(_texts(path, *texts))
    names = [_name(number, run) for number, run in recorded.items()]
    return _table(["option", *names], rows)


def _settings(number: int, run: Run) -> str:
    if not run.settings:
        return NOT_RECORDED
    rows = [_texts(path, *pair) for path, pair in run.settings.items()]
    table = _table(["option", "value", "source"], rows)
    return f"<details><summary>{len(rows)} options</summary>{table}</details>"


def _environment(number: int, run: Run) -> str:
    if not run.environment:
        return NOT_RECORDED
    rows = [_texts(*pair) for pair in run.environment.items()]
    return _table(["", ""], rows)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """header and rows: of HTML"""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    lines = [f"<tr>{head}</tr>"]
    for row in rows:
        cells = "".join(row)
        lines.append(f"<tr>{cells}</tr>")
    body = "\n".join(lines)
    return f'<div class="wide"><table>{body}</table></div>'


def _texts(*texts: object) -> list[str]:
    return [f"<td>{escape(str(text))}</td>" for text in texts]


def _cell(run: int, name: str, value: Number, form: str) -> str:
    if value is None:
        return '<td class="number">–</td>'
    return _value("td", run, name, value, form)


def _value(tag: str, run: int, name: str, value: float, form: str) -> str:
    """Return a number, with its exact value in data attributes."""
    attributes = (
        'class="number"',
        f'data-run="{run}"',
        f'data-name="{name}"',
        f'data-value="{value!r}"',
    )
    return f"<{tag} {' '.join(attributes)}>{form.format(value)}</{tag}>"
