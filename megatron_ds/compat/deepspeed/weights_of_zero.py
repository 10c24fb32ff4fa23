"""Take the fp32 weights out of an engine's checkpoint, with the arguments of DeepSpeed's script of this name.

    megatron-ds zero-to-fp32 saved pytorch_model.bin            # one file for torch.load
    megatron-ds zero-to-fp32 saved exported --safe_serialization

Checkpoints of pretrain_gpt.py, and formats other than fp32: megatron-ds export.
"""

import argparse
from collections.abc import Sequence

from megatron_ds.cli import Arguments
from megatron_ds.compat.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("checkpoint_dir", help="the save_dir of engine.save_checkpoint")
    add(
        "output_dir",
        help="a folder for the files, or one file that ends in .bin, .pt or .pth",
    )
    add(
        "--max_shard_size", default="5GB", help="longest file of a folder (default 5GB)"
    )
    add("--safe_serialization", action="store_true", help="write safetensors")
    add("-t", "--tag", help="which checkpoint (default: what was saved last)")
    add(
        "--exclude_frozen_parameters",
        action="store_true",
        help="refused: a checkpoint does not record which were frozen",
    )
    add("-d", "--debug", action="store_true", help="print the names of the tensors")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Write the weights, and print their number."""
    names = convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        args.max_shard_size,
        args.safe_serialization,
        args.tag,
        args.exclude_frozen_parameters,
    )
    if args.debug:
        print("\n".join(names))
    print(f"wrote {len(names)} fp32 tensors to {args.output_dir}")
    return 0


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    return main(parse_arguments(argv))
