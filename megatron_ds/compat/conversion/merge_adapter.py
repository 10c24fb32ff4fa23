"""Add the adapters of a checkpoint to the weights beside which they were trained.

    megatron-ds merge-adapter --load runs/adapter --save runs/whole
    megatron-ds merge-adapter --load peft_folder --base model_folder --save whole_folder --to huggingface

--load is the --save folder of a run with --lora-rank, or a folder of peft. The result computes what the model with
its adapters does, and has no adapters. One tensor is in memory at a time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import Arguments
from megatron_ds.compat.conversion import convert_checkpoint
from megatron_ds.compat.conversion.formats import Wishes, detected
from megatron_ds.errors import CheckpointError


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--load", type=Path, required=True, help="folder with adapters")
    add("--save", type=Path, required=True, help="new folder for the whole model")
    add(
        "--base",
        type=Path,
        metavar="DIR",
        help="folder of the frozen weights (default: the one that --load names)",
    )
    add(
        "--to",
        default="megatron_ds",
        metavar="FORMAT",
        help="format of --save: megatron_ds (default), huggingface, or another one of megatron-ds convert",
    )
    add(
        "--iteration", type=int, help="which checkpoint of --load (default: the latest)"
    )
    return parser


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    args = make_parser().parse_args(argv)
    found = detected(args.load)
    wishes = Wishes(iteration=args.iteration, base=args.base, weights_only=True)
    if found.read(args.load, wishes).adapters is None:
        raise CheckpointError(
            f"--load {args.load} has no adapters: it is a {found.noun} of a whole model. Give the --save folder of a "
            "run with --lora-rank, or a folder of peft."
        )
    # What remains is a conversion, whose source adds the adapters as it is read.
    words = ["--load", args.load, "--save", args.save, "--to", args.to]
    for flag, value in (("--base", args.base), ("--iteration", args.iteration)):
        if value is not None:
            words += [flag, value]
    return convert_checkpoint.run_tool([*map(str, words), "--no-optim"])
