"""Write one HTML file about one run or several: curves, numbers, how the wall time was spent, settings.

megatron-ds report runs/a runs/b --output report.html

A RUN is a --save folder that holds metrics.jsonl, or the file that --metrics-jsonl named; of a file with
several runs, the newest. The page refers to no other file and to no address.
"""

from collections.abc import Sequence
from pathlib import Path

from ...cli import Arguments, writing
from .page import page
from .recorded_run import read_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder or file of a run"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="page to write"
    )
    args = parser.parse_args(argv)
    text = page([read_run(place) for place in args.runs])
    with writing(args.output):
        args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}")
    return 0
