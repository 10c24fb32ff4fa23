"""Convert a checkpoint between formats: of this package, Hugging Face, Megatron-LM and DeepSpeed.

    megatron-ds convert --load Llama-3.2-1B --save runs/llama --to megatron_ds --verify
    megatron-ds convert --load runs/llama --save llama-finetuned --to huggingface

The format of --load is detected, or given by --from. Tensors are converted one at a time; the target is
complete or does not exist. Optimizer state, iteration and loss scale are carried where both formats have
them. Nothing in a file is executed. --verify computes the outputs of both checkpoints for random tokens, by
transformers for folders of Hugging Face, and prints the largest difference.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_ds.cli import Arguments
from megatron_ds.compat.conversion.files.stored_tensor import LogicalCheckpoint
from megatron_ds.compat.conversion.formats import (
    ALIASES,
    FORMATS,
    Format,
    Wishes,
    detected,
    format_of,
)
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.host.packages import missing_package

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}

# Wishes that some formats do not use → their flags.
FLAGS = {
    "iteration": "--iteration",
    "vocab_size": "--vocab-size",
    "dtype": "--dtype",
    "family": "--family",
    "shard_bytes": "--max-shard-size",
    "tensor_parallel": "--target-tensor-parallel-size",
    "pipeline_parallel": "--target-pipeline-parallel-size",
    "expert_parallel": "--target-expert-parallel-size",
    "allow_missing": "--allow-missing",
    "allow_unused": "--allow-unused",
    "qkv_packing": "--qkv-packing",
    "base": "--base",
    "mtp_num_layers": "--mtp-num-layers",
}
OF_VERIFY = {
    "vocab_size",
    "qkv_packing",
}  # wishes that reading the written folder needs, too


def size_of(text: str) -> int:
    """Return the number of bytes that a text such as "5GB" states."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    if not match or not (size := int(float(match[1]) * UNITS[match[2] or ""])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: use a number of bytes, or 500MB, 5GB"
        )
    return size


OPTIONS: dict[str, dict[str, Any]] = {
    "--load": {
        "type": Path,
        "required": True,
        "help": "folder of the checkpoint",
    },
    "--save": {
        "type": Path,
        "required": True,
        "help": "new folder",
    },
    "--from": {
        "dest": "source",
        "metavar": "FORMAT",
        "help": f"format of --load: {', '.join((*FORMATS, *ALIASES))}. Default: detected",
    },
    "--to": {
        "dest": "target",
        "metavar": "FORMAT",
        "help": "format of --save. Default: megatron_ds, or huggingface where --load is megatron_ds",
    },
    "--iteration": {
        "type": int,
        "help": "which checkpoint of --load (default: the latest)",
    },
    "--dtype": {
        "choices": ("float32", "bfloat16", "float16"),
        "help": "of the written weights (default: as the source's)",
    },
    "--family": {
        "help": (
            "family of models to write, such as llama (default: the source's, or the first that "
            "computes the same)"
        ),
    },
    "--vocab-size": {
        "type": int,
        "metavar": "N",
        "help": "true number of tokens, where the files hold padded rows",
    },
    "--max-shard-size": {
        "type": size_of,
        "default": 5 * 10**9,
        "metavar": "SIZE",
        "help": "longest file of a Hugging Face folder, such as 5GB (default)",
    },
    "--target-tensor-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "tensor-parallel size of the written files, for formats whose files have one",
    },
    "--target-pipeline-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "pipeline-parallel size of the written files, for formats whose files have one",
    },
    "--target-expert-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": (
            "expert-parallel size of the run that loads the written files, for formats whose optimizer "
            "state depends on it"
        ),
    },
    "--allow-missing": {
        "action": "append",
        "default": [],
        "metavar": "PATTERN",
        "help": "tensors that the source may lack; they get the values of a new model",
    },
    "--allow-unused": {
        "action": "append",
        "default": [],
        "metavar": "PATTERN",
        "help": "tensors of the source that may be left out",
    },
    "--qkv-packing": {
        "choices": ("heads", "thirds"),
        "help": (
            "order of the rows of query_key_value in checkpoints of Megatron-DeepSpeed, which do not record "
            "it"
        ),
    },
    "--base": {
        "type": Path,
        "metavar": "DIR",
        "help": "the weights beside which the adapters of --load were trained (default: the folder that they name)",
    },
    "--mtp-num-layers": {
        "type": int,
        "metavar": "K",
        "help": (
            "read the first K layers of a Hugging Face folder that predict later tokens; without it they are left "
            "out"
        ),
    },
    "--no-optim": {
        "action": "store_true",
        "help": "convert weights only",
    },
    "--verify": {
        "action": "store_true",
        "help": "compare the outputs of both checkpoints; needs the memory of both models in float32",
    },
    "--tolerance": {
        "type": float,
        "default": 1e-4,
        "help": "largest difference that --verify accepts, relative to the largest output (default 1e-4)",
    },
}


def make_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    parser.add_table(OPTIONS)
    return parser


def main(args: argparse.Namespace) -> int:
    """Read one format and write the other. Returns the exit code."""
    # What the target cannot do is an error before anything is read.
    source = format_of(args.source) if args.source else detected(args.load)
    default = "huggingface" if source.name == "megatron_ds" else "megatron_ds"
    target = format_of(args.target or default)
    if target.write is None:
        raise ConfigError(f"--to {target.name}: the {target.noun} is only read.")
    if args.verify and not target.can_verify:
        raise ConfigError(
            f"--verify: a written {target.noun} does not describe its model, so it cannot be "
            "read again. Omit --verify."
        )
    if args.verify:
        check_transformers(source, target)
    if args.save.resolve() == args.load.resolve():
        raise ConfigError(f"--save {args.save} is --load. Give a new folder.")
    # So is a flag that neither format uses.
    wishes = Wishes(
        args.iteration,
        args.vocab_size,
        args.dtype,
        args.max_shard_size,
        args.family,
        args.target_tensor_parallel_size,
        args.target_pipeline_parallel_size,
        args.target_expert_parallel_size,
        tuple(args.allow_missing),
        tuple(args.allow_unused),
        args.no_optim,
        args.qkv_packing,
        args.base,
        args.mtp_num_layers,
    )
    check_used(wishes, source, target, args.verify)
    # The bar counts the bytes of the source's tensors.
    checkpoint = source.read(args.load, wishes)
    print(f"read {args.load}: {source.noun}{described(checkpoint)}", flush=True)
    total = 0
    for named in checkpoint.tensors.values():
        total += sum(tensor.nbytes for tensor in named.values())
    with progress(total) as done:
        lines = target.write(
            checkpoint, args.save, Wishes(**{**vars(wishes), "done": done})
        )
    print("\n".join(lines), flush=True)
    if args.verify:
        verify_written(checkpoint, args, target)
    return 0


def check_transformers(*formats: Format) -> None:
    """Raises ConfigError if --verify would need transformers for a format, and it is not installed."""
    if (
        any(one.name == "huggingface" for one in formats)
        and find_spec("transformers") is None
    ):
        raise missing_package(
            "--verify of a folder of Hugging Face",
            "transformers",
            "hf",
            "it is not installed",
            "Or omit --verify. Nothing was written.",
        )


def check_used(wishes: Wishes, source: Format, target: Format, verify: bool) -> None:
    """Raises ConfigError naming the flags that neither the source nor the target uses."""
    used = {
        *source.reads,
        *target.writes,
        *(OF_VERIFY & {*target.reads} if verify else ()),
    }
    if odd := [
        flag
        for name, flag in FLAGS.items()
        if name not in used and getattr(wishes, name) != getattr(Wishes, name)
    ]:
        raise ConfigError(
            f"{' and '.join(odd)}: neither reading the {source.noun} nor writing the "
            f"{target.noun} uses it. Omit it."
        )


def described(checkpoint: LogicalCheckpoint) -> str:
    """Return the part of a line that states what was found in a checkpoint, and what is left out."""
    weights = checkpoint.tensors["weight"]
    elements = sum(
        tensor.nbytes // tensor.dtype.itemsize for tensor in weights.values()
    )
    kinds = sorted(kind for kind in checkpoint.tensors if kind != "weight")
    parts = [
        f", {checkpoint.source['family']}" if checkpoint.source.get("family") else "",
        f", {len(weights)} tensors of {elements:,} weights",
        f", optimizer state {', '.join(kinds)}" if kinds else "",
        f", iteration {step}"
        if (step := checkpoint.progress.iteration) is not None
        else "",
    ]
    lists = {"left out": checkpoint.unused, "ignored": checkpoint.ignored}
    texts = [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
    return "\n".join(
        (
            "".join(parts),
            *texts,
            *(f"differs here: {note}" for note in checkpoint.notes),
        )
    )


def verify_written(
    source: LogicalCheckpoint, args: argparse.Namespace, target: Format
) -> None:
    """Read the new folder and compare it with the source. Raises CheckpointError if they differ; the folder then
    stays."""
    wishes = Wishes(
        vocab_size=source.model.get("vocab_size"),
        qkv_packing=args.qkv_packing,
        weights_only=True,
    )
    try:
        verify(source, target.read(args.save, wishes), args.tolerance)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} {args.save} was written, and this verification of it failed: delete "
            "it."
        ) from error


def verify(
    source: LogicalCheckpoint, target: LogicalCheckpoint, tolerance: float
) -> None:
    """Print the largest difference of the outputs. Raises CheckpointError if it is above the tolerance."""
    # Only --verify needs these modules.
    from megatron_ds.compat.conversion.family import model_of
    from megatron_ds.compat.conversion.huggingface.format import detect
    from megatron_ds.compat.conversion.logits_proof import (
        largest_difference,
        outputs_of,
        random_tokens,
    )

    # Both models compute the same random tokens.
    tokens = random_tokens(model_of(source.model, source.folder))
    difference, largest = largest_difference(
        outputs_of(source, tokens), outputs_of(target, tokens)
    )
    text = (
        f"largest difference of outputs {difference:.3g} for {tokens.numel()} random tokens; largest "
        f"output {largest:.3g}"
    )
    # NaN fails, too: it compares as False.
    if not difference <= tolerance * largest:
        raise CheckpointError(
            f"{text}: above {tolerance:g} of it. The conversion is wrong, or the weights "
            "were rounded to another dtype; --tolerance sets the limit."
        )
    print(f"verified: {text}")
    # Without a foreign program the comparison is weaker.
    if not detect(source.folder) and not detect(target.folder):
        print(
            "both outputs were computed by this package, none by the program that the files are of: an "
            "error that reading and writing have in common is not noticed"
        )


@contextmanager
def progress(total: int):
    """A bar of bytes on a terminal; yields the function that advances it."""
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="converting",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    # Torch then uses huge pages, which take 3/4 of the system time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return main(make_parser().parse_args(argv))
