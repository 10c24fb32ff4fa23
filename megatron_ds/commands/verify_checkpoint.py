"""Read every byte of a checkpoint, and compare it with the saved checksums, for instance after copying it.

    megatron-ds verify --load quickstart/checkpoints

The exit code is 0 if no file has changed, else 2, with a line for each changed file.
"""

import argparse
from collections.abc import Sequence

from megatron_ds.checkpoint.folder import is_ours, read_tracker, steps_in
from megatron_ds.checkpoint.load import check_directory, find_checkpoint
from megatron_ds.checkpoint.place import place_of
from megatron_ds.checkpoint.run_file import damaged_files
from megatron_ds.cli import Arguments
from megatron_ds.errors import CheckpointError


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--load",
        type=place_of,
        required=True,
        help="checkpoint folder of a run (its --save)",
    )
    parser.add_argument(
        "--iteration",
        type=int,
        help="which checkpoint of the folder (default: the one in the tracker)",
    )
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Compare all files with their checksums. Raises CheckpointError."""
    step = args.iteration
    check_directory(args.load)
    if is_ours(args.load):
        raise CheckpointError(
            f"{args.load} is a checkpoint itself: --load takes the folder above it, {args.load.resolve().parent}, and "
            "--iteration chooses one of several."
        )
    if step is None:
        tracker = read_tracker(args.load)
        if tracker is None or not tracker.isdecimal():
            raise CheckpointError(
                f"--load {args.load}: no tracker there names an iteration. Give "
                "--iteration, one of "
                f"{', '.join(map(str, steps_in(args.load))) or 'none'}."
            )
        step = int(tracker)
    path = find_checkpoint(args.load, step)
    problems = list(damaged_files(path))
    if problems:
        raise CheckpointError(
            f"{path} is not what was saved: {'; '.join(problems)}. Copy these files again, "
            "or load another iteration."
        )
    print(f"{path}: all files are as they were saved")
    return 0


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    return main(parse_arguments(argv))
