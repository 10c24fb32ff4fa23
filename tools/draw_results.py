"""Draw the first table of docs/reference/results.md: how many times as fast as other programs.

python tools/draw_results.py            write docs/pictures/results.svg
"""

import argparse
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.cli import Arguments, main_guard  # noqa: E402
from megatron_ds.errors import DataError  # noqa: E402
from megatron_ds.extensions.report.picture import FAINT, INK  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "results.md"
# Number, what, beside, times as fast, machine, date.
ROW = re.compile(
    r"^\| \d+ \| ([^|]+) \| ([^|]+) \| ([\d.]+) \| ([^|]+) \| [\d-]+ \|$", re.MULTILINE
)
TITLE = "Times as fast as other programs, on two CPU cores; training steps are of a GPT of 14 M parameters"
FASTER = "#4c86c6"
SLOWER = "#d9822b"
# Pixels. UNIT is the length of "as fast".
WIDTH = 900
LEFT = 520
TOP = 34
ROW_HEIGHT = 22
BAR = 14
UNIT = 92


@dataclass(frozen=True)
class Result:
    """One row of the table. ratio: the time of the other program divided by ours."""

    what: str
    beside: str
    ratio: float
    machine: str


def results(page: str) -> list[Result]:
    """The rows of the table. Raises DataError where there are none."""
    found = [
        Result(what, beside.replace("`", ""), float(ratio), machine)
        for what, beside, ratio, machine in ROW.findall(page)
    ]
    if not found:
        raise DataError(
            f"{PAGE} has no row of six cells: number, what, beside, times as fast, machine, "
            "date. Write the table in this form."
        )
    return found


def picture(rows: list[Result]) -> str:
    """A bar for each row, as the text of an SVG file. A line marks equal speed."""
    height = TOP + ROW_HEIGHT * len(rows) + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="18" font-size="13" font-weight="bold" fill="{INK}">{TITLE}</text>',
    ]
    for number, row in enumerate(rows):
        y = TOP + ROW_HEIGHT * number
        end = LEFT + row.ratio * UNIT
        label = f"{row.what}, beside {row.beside} ({row.machine})"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" fill="{INK}" font-size="11">'
            f"{escape(label)}</text>",
            f'<rect x="{LEFT}" y="{y + 1}" width="{row.ratio * UNIT:.1f}" height="{BAR}" '
            f'fill="{FASTER if row.ratio >= 1 else SLOWER}"/>',
            f'<text x="{end + 6:.1f}" y="{y + 12}" fill="{INK}">{row.ratio:.2f}</text>',
        ]
    bottom = TOP + ROW_HEIGHT * len(rows)
    lines += [
        f'<line x1="{LEFT + UNIT}" y1="{TOP - 4}" x2="{LEFT + UNIT}" y2="{bottom}" stroke="{INK}" '
        'stroke-dasharray="3 3"/>',
        f'<text x="{LEFT + UNIT}" y="{bottom + 14}" text-anchor="middle" fill="{FAINT}" font-size="11">'
        "equal speed</text>",
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Write the picture."""
    args.output.write_text(
        picture(results(PAGE.read_text(encoding="utf-8"))), encoding="utf-8"
    )
    print(f"wrote {args.output}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "pictures" / "results.svg",
        help="picture to write (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments())))
