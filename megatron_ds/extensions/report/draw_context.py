"""Draw which rank holds which tokens of a sequence, and which scores of causal attention it computes.

    megatron-ds draw-context --context-parallel-size 4 --output who_holds_what.svg

Left: two chunks on each rank, one from each half of the sequence, so that all have equally many scores.
Right: one run of tokens on each rank.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import Arguments
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.sequence_slice import RankPart, SequenceSlice

COLOURS = (
    "#4878a8",
    "#e08c3c",
    "#62a06a",
    "#b8566b",
    "#8472a8",
    "#8c6f5a",
    "#cf86b8",
    "#7d7d7d",
)
CELL = 26
MARGIN = 20
TOP = 84
NARROWEST = 190  # pixels of a panel, for its captions


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    add(
        "--context-parallel-size",
        type=int,
        default=4,
        help="ranks that share a sequence (default 4)",
    )
    add("--output", type=Path, required=True, help="picture to write (.svg)")
    return parser.parse_args(argv)


def owners(ranks: int, zigzag: bool) -> list[int]:
    """Return the rank of each of 2 * ranks equal chunks of a sequence."""
    chunks = 2 * ranks
    found = [0] * chunks
    for rank in range(ranks):
        part = SequenceSlice(RankPart(rank, ranks), zigzag=zigzag)
        for run in part.runs(chunks):
            for chunk in run:
                found[chunk] = rank
    return found


def shares(owner: list[int]) -> list[float]:
    """Return the part of all causal scores whose queries each rank holds; half of a chunk's own square counts."""
    whole = len(owner) ** 2 / 2
    held = [0.0] * (max(owner) + 1)
    for chunk, rank in enumerate(owner):
        held[rank] += chunk + 0.5
    return [scores / whole for scores in held]


def svg(ranks: int) -> str:
    """Both panels as an SVG."""
    panels = [
        ("two chunks per rank (zigzag)", owners(ranks, True)),
        ("one run per rank", owners(ranks, False)),
    ]
    size = 2 * ranks * CELL
    pitch = max(size, NARROWEST) + 2 * MARGIN
    width = 2 * pitch + MARGIN
    height = TOP + size + 3 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, owner) in enumerate(panels):
        lines += _panel(title, owner, 2 * MARGIN + number * pitch)
    return "\n".join([*lines, "</svg>", ""])


def _panel(title: str, owner: list[int], left: int) -> list[str]:
    """Return the tokens in a row, the scores below: a row for the queries of a chunk, a column for its keys."""
    lines = [f'<text x="{left}" y="{MARGIN}" font-weight="bold">{title}</text>']
    for chunk, rank in enumerate(owner):
        x = left + chunk * CELL
        y = TOP + chunk * CELL
        fill = COLOURS[rank % len(COLOURS)]
        # The row of tokens shows the rank of each chunk.
        lines += [
            f'<rect x="{x}" y="{TOP - 50}" width="{CELL}" height="{CELL}" fill="{fill}" '
            'stroke="white"/>',
            f'<text x="{x + CELL // 2}" y="{TOP - 33}" fill="white" text-anchor="middle">{rank}</text>',
        ]
        # A causal mask leaves all earlier chunks, and half of the scores with the chunk itself.
        for keys in range(chunk):
            lines.append(
                f'<rect x="{left + keys * CELL}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" '
                'stroke="white"/>'
            )
        lines.append(
            f'<path d="M{x} {y}V{y + CELL}H{x + CELL}Z" fill="{fill}" stroke="white"/>'
        )
    # The shares show whether the work is even.
    size = len(owner) * CELL
    listed = " ".join(f"{share:.0%}" for share in shares(owner))
    lines += [
        f'<text x="{left}" y="{TOP - 8}">keys</text>',
        f'<text x="{left}" y="{TOP + size + MARGIN}">scores of ranks 0, 1, …:</text>',
        f'<text x="{left}" y="{TOP + size + 2 * MARGIN}">{listed}</text>',
        f'<text x="{left - 6}" y="{TOP}" text-anchor="end" transform="rotate(-90 {left - 6} {TOP})">'
        "queries</text>",
    ]
    return lines


def main(args: argparse.Namespace) -> int:
    """Write the picture."""
    if args.context_parallel_size < 2:
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size}: one rank holds all tokens. "
            "Use 2 or more."
        )
    if args.output.suffix != ".svg":
        raise ConfigError(
            f"--output {args.output} is not a .svg file. Use such a name."
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(svg(args.context_parallel_size), encoding="utf-8")
    return 0


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    return main(parse_arguments(argv))
