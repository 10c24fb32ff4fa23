"""Flags that a command adds to those given, from the run that wrote a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...checkpoint.folder import is_ours
from ...checkpoint.load import latest, read_run
from ...errors import CheckpointError

LAYOUT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--context-parallel-size",
    "--zero-stage",
)
TOKENIZER_FILES = ("--tokenizer-model", "--vocab-file", "--merge-file")


def saved_flags(
    load: Path, iteration: int | None, given: Sequence[str], world_size: int
) -> list[str]:
    """Return the flags of a run that generates: those given, the kind of tokenizer of the checkpoint, and tensor
    parallelism over all processes unless they name a layout. Raises CheckpointError."""
    flags = ["--load", str(load), *given]
    if not _names(given, LAYOUT):
        flags += ["--tensor-model-parallel-size", str(world_size)]
    saved = _saved(load, iteration)
    # A user may name the files of the same tokenizer in another place: its kind stays.
    kind = saved.get("data", {}).get("tokenizer_type")
    if (
        kind
        and _names(given, TOKENIZER_FILES)
        and not _names(given, ["--tokenizer-type"])
    ):
        flags += ["--tokenizer-type", kind]
    return flags


def _names(given: Sequence[str], flags: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in flags for word in given)


def _saved(load: Path, iteration: int | None) -> Mapping:
    """Return the configuration in run.json; {} of another program's checkpoint."""
    if is_ours(load):
        number = load.resolve().name.removeprefix("iter_").lstrip("0") or "0"
        chosen = f" --iteration {number}" * number.isdecimal()
        raise CheckpointError(
            f"--load {load} is a checkpoint, and --load takes the folder that holds it. Use --load "
            f"{load.resolve().parent}{chosen}."
        )
    newest = latest(load)
    if newest is None:
        return {}
    return read_run(load, newest if iteration is None else iteration).get("config", {})
