"""Export the weights of a checkpoint, of any layout and ZeRO stage, to a folder of safetensors as Hugging
Face's.

    megatron-ds export --load quickstart/checkpoints --output quickstart/safetensors

One tensor is in memory at a time. For an engine's checkpoint, buffers are included, and the names are
those of the module that was trained: `from_pretrained` reads the folder when the model's config.json is
in it.

Tensors of a pretraining run keep this package's names, such as
decoder.layers.0.self_attention.linear_qkv.weight. `from_pretrained` of Hugging Face needs other names, and
some tensors split or joined: megatron-ds convert writes those. A config.json with the sizes of the
model, the tokenizer and the iteration is written to the folder, unless it has one of another program.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_ds.checkpoint.folder import is_ours, read_tracker, write_durably
from megatron_ds.checkpoint.load import latest, read_run
from megatron_ds.checkpoint.place import place_of
from megatron_ds.checkpoint.run_file import require, require_whole_model
from megatron_ds.checkpoint.safetensors_folder import TensorEntry, write_folder
from megatron_ds.checkpoint.whole_tensors import StoredTensors
from megatron_ds.cli import Arguments
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.host.regular_file import read_regular
from megatron_ds.mpu.group import solo

CONFIG = "config.json"
MODEL_TYPE = "megatron_ds"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command. Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # What is read and written; then the format of the files.
    add(
        "--load",
        type=place_of,
        required=True,
        help="checkpoint folder of a run (its --save), or of an engine's tag",
    )
    add(
        "--output",
        type=Path,
        required=True,
        help="folder for the files; what else is in it stays",
    )
    add(
        "--iteration",
        type=int,
        help="which checkpoint of the folder (default: the latest)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights (default float32, as they are saved)",
    )
    add(
        "--max-shard-bytes",
        type=int,
        default=5 * 10**9,
        help="longest file, in bytes (default 5000000000)",
    )
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Write the folder, and print where it is."""
    if args.max_shard_bytes < 1:
        raise ConfigError(
            f"--max-shard-bytes {args.max_shard_bytes}: a file needs room. Use a positive "
            "number of bytes."
        )
    if is_ours(args.output) or read_tracker(args.output) is not None:
        raise ConfigError(
            f"--output {args.output} holds the checkpoints of a run, and programs would take config.json and weights "
            "among them for another model. Give another folder."
        )
    # The checkpoint of an engine's tag has no configuration.
    step = args.iteration if args.iteration is not None else latest(args.load)
    if step is None:
        raise CheckpointError(
            f"--load {args.load}: no complete checkpoint there. Give what was --save in "
            "training."
        )
    run = read_run(args.load, step)
    require_whole_model(run, args.load)
    if "config" in run:
        require(run, args.load, "identity.model", "config.data.tokenizer_type")
    # Only fp32 tensors are converted; integers and bytes keep their format.
    stored = StoredTensors(args.load, step, ("weight", "buffer"))
    entries = [
        TensorEntry(
            e.name, e.shape, DTYPES[args.dtype] if e.dtype == torch.float32 else e.dtype
        )
        for e in stored.entries
    ]
    write_folder(args.output, entries, stored.read_all, solo(), args.max_shard_bytes)
    mebibytes = sum(entry.nbytes for entry in entries) / 2**20
    print(
        f"wrote {len(entries)} tensors, {mebibytes:.1f} MiB, of iteration {step} to {args.output}"
    )
    if "config" in run:
        write_config(args.output / CONFIG, run, args.dtype)
    return 0


def write_config(file: Path, run: Mapping, dtype: str) -> None:
    """Write what is known of the model, for readers of the files.

    A config.json that another program wrote stays as it is.
    """
    if file.exists() and MODEL_TYPE.encode() not in read_regular(file, CheckpointError):
        print(f"{file} was there and is left as it is")
        return
    tokenizer = {
        name: value
        for name, value in run["config"]["data"].items()
        if name.startswith("tokenizer")
    }
    values = {
        "model_type": MODEL_TYPE,
        "tensor_names": "megatron_ds",
        "dtype": dtype,
        "iteration": run["step"],
        "megatron_ds_version": run.get("version"),
        "model": run["identity"]["model"],
        "tokenizer": tokenizer,
    }
    write_durably(file, json.dumps(values, indent=2) + "\n")
    print(
        f"wrote {file}. Tensors have the names of this package: from_pretrained of Hugging Face needs "
        "those that megatron-ds convert writes"
    )


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    return main(parse_arguments(argv))
