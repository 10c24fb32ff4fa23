"""Take the weights out of a checkpoint, of any layout and ZeRO stage, into safetensors files as Hugging Face lays them out.

    python tools/checkpoint_to_safetensors.py --load quickstart/checkpoints --output quickstart/safetensors

Tensors keep their names and go through memory one at a time. Of an engine's checkpoint the buffers come along.
"""

import argparse
import sys
from pathlib import Path

import torch

from megatron_ds.checkpoint.load import latest
from megatron_ds.checkpoint.safetensors_folder import TensorEntry, write_folder
from megatron_ds.checkpoint.stored import StoredTensors
from megatron_ds.config.arguments import Arguments
from megatron_ds.config.guard import main_guard
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.mpu.group import solo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--load", type=Path, required=True, help="checkpoint folder of a run (what was its --save), or of an engine's tag")
    add("--output", type=Path, required=True, help="folder for the files; what else is in it stays")
    add("--iteration", type=int, help="which checkpoint of the folder (default: the latest)")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32, as they are saved)")
    add("--max-shard-bytes", type=int, default=5 * 10**9, help="longest file, in bytes (default 5000000000)")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    if args.max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-bytes {args.max_shard_bytes}: a file needs room. Use a positive number of bytes.")
    step = args.iteration if args.iteration is not None else latest(args.load)
    if step is None:
        raise CheckpointError(f"--load {args.load}: no complete checkpoint there. Give what was --save in training.")
    stored = StoredTensors(args.load, step, ("weight", "buffer"))
    entries = [TensorEntry(e.name, e.shape, DTYPES[args.dtype] if e.dtype == torch.float32 else e.dtype)
               for e in stored.entries]
    write_folder(args.output, entries, stored.read_all, solo(), args.max_shard_bytes)
    mebibytes = sum(entry.nbytes for entry in entries) / 2**20
    print(f"wrote {len(entries)} tensors, {mebibytes:.1f} MiB, of iteration {step} to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(parse_arguments()), rank=0))
