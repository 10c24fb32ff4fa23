"""`FORMATS`: the formats of checkpoints that can be read and written, by the name that --from and --to take.

A module of this package is imported when its format is first used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ...checkpoint.folder import is_ours
from ...errors import CheckpointError, ConfigError
from ...registry import did_you_mean
from .files.stored_tensor import LogicalCheckpoint


@dataclass(frozen=True)
class Wishes:
    """What the user gives besides the folders.

    iteration      which checkpoint of the folder; None for the latest
    vocab_size     true number of rows of the vocabulary, where the files hold padded ones; None: unknown
    dtype          of written weights: "float32", "bfloat16", "float16"; None for the source's
    shard_bytes    longest file to write
    family         name of the family of models to write as; None: from the source or the options
    tensor_parallel, pipeline_parallel    sizes of a written layout, for formats whose files have one
    allow_missing, allow_unused           names of tensors that are not errors; patterns of fnmatch
    weights_only   without optimizer state and progress
    base           folder of the weights beside which adapters were trained; None: the one that they name
    mtp_num_layers layers of the files that predict later tokens, to be read; None: left out
    qkv_packing    of Megatron-DeepSpeed's query_key_value: "heads" or "thirds"; None: not known
    done           called with the bytes of each tensor of the source that was converted
    """

    iteration: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    family: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    allow_missing: tuple[str, ...] = ()
    allow_unused: tuple[str, ...] = ()
    weights_only: bool = False
    qkv_packing: str | None = None
    base: Path | None = None
    mtp_num_layers: int | None = None
    done: Callable[[int], object] = lambda count: None


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint folder.

    name    as --from and --to take it
    noun    in messages
    detect  whether a folder looks like it: reads names of files, not contents
    read    function(folder, wishes) -> LogicalCheckpoint. Raises CheckpointError
    write   function(checkpoint, folder, wishes) -> lines that state what was written. The folder is written
            complete or not at all. None for a format that is only read
    expects        whether a folder that no format detects is an incomplete one of this format, of which `read` raises
                   an error with what is missing
    can_verify     whether a written folder describes its model, so that it can be read again
    reads, writes  names of the wishes that `read` and `write` use. weights_only and done hold for all
    """

    name: str
    noun: str
    detect: Callable[[Path], bool]
    read: Callable[[Path, Wishes], LogicalCheckpoint]
    write: Callable[[LogicalCheckpoint, Path, Wishes], list[str]] | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    can_verify: bool = True
    expects: Callable[[Path], bool] = lambda folder: False


# name → module of this package and the format's name in it. `detected` tries them in this order.
FORMATS: dict[str, str] = {
    "megatron_ds": "own_format.FORMAT",
    "peft": "huggingface.peft_format.FORMAT",
    "huggingface": "huggingface.format.FORMAT",
    "deepspeed-universal": "deepspeed.format.UNIVERSAL_FORMAT",
    "deepspeed": "deepspeed.format.FORMAT",
    "megatron_torch_dist": "megatron.torch_dist_format.FORMAT",
    "megatron_torch": "megatron.torch_format.FORMAT",
}
ALIASES = {
    "hf": "huggingface",
    "ours": "megatron_ds",
    "torch_dist": "megatron_torch_dist",
    "torch": "megatron_torch",
}


def format_of(name: str) -> Format:
    """Return the format of this name. Raises ConfigError with the most similar name."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ConfigError(
            f"unknown format of checkpoints {name!r}{did_you_mean(name, [*FORMATS]) or '.'} "
            f"Known: {', '.join((*FORMATS, *ALIASES))}."
        )
    module, attribute = FORMATS[name].rsplit(".", 1)
    return getattr(import_module(f".{module}", __package__), attribute)


def detected(folder: Path) -> Format:
    """Return the format of a folder, from the names of its files. Raises CheckpointError if none matches."""
    formats = list(map(format_of, FORMATS))
    for found in formats:
        if found.detect(folder):
            return found
    for found in formats:
        if found.expects(folder):
            return found
    if is_ours(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint itself: give the folder above it, {folder.resolve().parent}. --iteration "
            "chooses one of several."
        )
    what = (
        "is empty" if folder.is_dir() and not any(folder.iterdir()) else "matches none"
    )
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist. Correct the path.")
    raise CheckpointError(
        f"the format of {folder} is not known: it {what} of {', '.join(FORMATS)}. Give the "
        "folder that contains the files, and --from NAME (--load-format NAME in training)."
    )
