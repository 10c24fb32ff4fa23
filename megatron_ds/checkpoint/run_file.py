"""`run.json`: the run that wrote a checkpoint, and sizes and checksums of its files, in plain JSON.

    format_version   of the checkpoint; a reader refuses a later one
    step             optimizer steps done
    save_id          random identifier of this save; the index has the same
    versions         of Python and torch that wrote it; informative
    ...              values that the caller adds: config, progress, identity of model and data, scaler state
    files            size in bytes and CRC-32 of every other file of the checkpoint
    checksum         CRC-32 of all values above, as JSON with sorted keys and without spaces

Format 1 had no save_id, files or checksum. It is still read.
"""

import json
import math
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..features import features, missing_wings
from ..progress.ramps import Progress
from .folder import INDEX_FILE, RUN_FILE, read_regular, write_durably

FORMAT_VERSION = 2
# of the identity of a run that trains a whole model
PARTS = ("model", "tokenizer", "data")
MOST = 2**62  # larger counters do not fit into the integers of torch
BLOCK = 2**24  # bytes read at once to verify a file


# ---- Writing.


def plain(run: Mapping) -> dict:
    """`run` as it is after a round trip through JSON. Raises TypeError for a value that JSON cannot hold."""
    return json.loads(json.dumps(dict(run)))


def write_run_file(
    path: Path, step: int, run: Mapping, save_id: str, files: Mapping[str, Mapping]
) -> None:
    """Write run.json durably. run: values of the caller; files: as `storage.write_index` returned them.

    Raises CheckpointError if `read_run_file` would refuse it, before the former checkpoint is replaced.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    content = plain(
        {
            "format_version": FORMAT_VERSION,
            "step": step,
            "save_id": save_id,
            "versions": versions,
            **run,
            "files": files,
        }
    )
    content["checksum"] = checksum_of(content)
    if problem := next(_problems(content, step), None):
        raise CheckpointError(f"{RUN_FILE} could not be read again: {problem}.")
    write_durably(path / RUN_FILE, json.dumps(content, indent=2) + "\n")


def checksum_of(content: Mapping) -> str:
    """Return eight hex digits over all values but "checksum"; indentation and the order of keys do not matter."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


def entry_of(size: int, crc32: int) -> dict[str, Any]:
    """Return the entry of a file in the table `files`."""
    return {"bytes": size, "crc32": f"{crc32:08x}"}


def check_crc32(content: bytes, entry: Mapping) -> None:
    """Raise ValueError when `content` does not match its entry in `files`."""
    if len(content) != entry["bytes"]:
        raise ValueError(
            f"it has {len(content)} bytes, and {entry['bytes']} were saved"
        )
    if (found := f"{zlib.crc32(content):08x}") != entry["crc32"]:
        raise ValueError(
            f"its CRC-32 is {found}, and run.json records {entry['crc32']}. Either bytes have "
            "changed, or one of the two files is that of another save"
        )


# ---- Reading.


def read_run_file(path: Path) -> dict:
    """Return the valid values. Raises CheckpointError when run.json is missing, damaged, or of a later format."""
    file = path / RUN_FILE
    try:
        return _validated(file, json.loads(read_regular(file)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} has no {RUN_FILE}: it was not saved by this package, or is "
            "incomplete."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror or error}."
        ) from error
    except RecursionError as error:
        raise CheckpointError(
            f"{file} is damaged: its values are nested too deeply."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error


def _validated(file: Path, run: Any) -> dict:
    version = run.get("format_version") if isinstance(run, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{file} is damaged: it has no format_version.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} is of format {version}; this version reads formats up to "
            f"{FORMAT_VERSION}. Load it with the version that wrote it, or a newer one."
        )
    # None when a user has renamed the directory.
    named = re.search(r"iter_(\d{7,})", file.parent.name)
    if problem := next(_problems(run, int(named[1]) if named else None), None):
        raise CheckpointError(
            f"{file} is damaged, or was changed after it was saved: {problem}."
        )
    return run


def require(run: Mapping, path: str | Path, *names: str) -> None:
    """Raises CheckpointError unless `run` of checkpoint `path` has all `names`, such as "identity.model"."""
    for name in names:
        value: Any = run
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise CheckpointError(
                f"{RUN_FILE} of {path} has no {name!r}: it is damaged, or another program "
                "wrote it."
            )


def require_whole_model(run: Mapping, folder: str | Path) -> None:
    """Raises CheckpointError if the checkpoint in `folder` does not hold the weights of a whole model."""
    for why in unloadable(run.get("identity", {}), None, folder):
        raise CheckpointError(why)


def unloadable(
    saved: Mapping, current: Mapping | None, folder: str | Path
) -> Iterator[str]:
    """Yield why the weights of a checkpoint cannot be loaded.

    saved, current: identities of the checkpoint and of the run; None where a whole model is wanted
    """
    wanted = {} if current is None else current
    for feature in features():
        if feature.unloadable is not None:
            yield from feature.unloadable(saved, current, folder)
        elif feature.name in saved and saved.get(feature.name) != wanted.get(
            feature.name
        ):
            yield (
                f"--load {folder} holds {feature.name} with {saved[feature.name]}, and this run wants "
                f"{wanted.get(feature.name, 'none')}. Give the run the options of the checkpoint."
            )
    unknown = saved.keys() - {*PARTS, *(feature.name for feature in features())}
    if unknown:
        yield (
            f"--load {folder} holds {', '.join(sorted(unknown))}, which no feature that is loaded knows, and not the "
            f"weights of a model alone.{missing_wings()}"
        )


def progress_of(run: Mapping) -> Progress:
    """Return the progress of training; counters that this version does not know are left out."""
    known = {field.name for field in fields(Progress)}
    return Progress(
        **{name: value for name, value in run["progress"].items() if name in known}
    )


def _problems(run: Mapping, step_of_folder: int | None) -> Iterator[str]:
    """Yield the problems of `run`. Use the first only: later checks rely on earlier ones."""
    if "checksum" in run or run["format_version"] >= 2:
        if run.get("checksum") != (found := checksum_of(run)):
            yield f"its values have the checksum {found}, and it records {run.get('checksum')}"
        for name in ("save_id", "files"):
            if name not in run:
                yield f"it has no {name}"
    elif not run.keys().isdisjoint(("save_id", "files")):
        yield "it has no checksum"
    step: Any = run.get("step")
    if not _is_count(step):
        yield f"step is {_show(step)}, not a number of steps"
    elif step_of_folder is not None and step != step_of_folder:
        yield f"it is of step {step}, and its directory of step {step_of_folder}"
    for name, (is_valid, meaning) in _VALUES.items():
        if name in run and not is_valid(run[name]):
            yield f"{name} is {_show(run[name])}, not {meaning}"
    if "progress" in run:
        yield from _progress_problems(run["progress"], step)


def _progress_problems(progress: Mapping, step: int) -> Iterator[str]:
    p = {field.name: progress.get(field.name, 0) for field in fields(Progress)}
    if p["step"] != step:
        yield f"progress.step is {p['step']} at step {step}"
    for name, most in {
        "scheduled_samples": "samples",
        "skipped_steps": "step",
        "nan_steps": "step",
    }.items():
        if p[name] > p[most]:
            yield f"progress.{name} is {p[name]}, more than progress.{most}, {p[most]}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_file_table(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and INDEX_FILE in value
        and all(
            isinstance(entry, dict)
            and _is_count(entry.get("bytes"))
            and isinstance(entry.get("crc32"), str)
            and re.fullmatch("[0-9a-f]{8}", entry["crc32"])
            for entry in value.values()
        )
    )


def _is_progress(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"step", "samples"} <= value.keys()
        and all(_is_count(value.get(field.name, 0)) for field in fields(Progress))
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_count(value.get("num_updates")):
        return False
    scaler = {
        "loss_scale": _is_scale,
        "loss_scale_lives": _is_count,
        "loss_scale_iteration": _is_count,
        "loss_scale_last_overflow": lambda n: (
            n == -1 and type(n) is int or _is_count(n)
        ),
    }
    return value.keys().isdisjoint(scaler) or all(
        is_valid(value.get(name)) for name, is_valid in scaler.items()
    )


def _is_spikes(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_count(value.get("in_a_row"))
        and isinstance(value.get("norms"), list)
        and all(
            type(norm) in (int, float) and math.isfinite(norm)
            for norm in value["norms"]
        )
    )


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "save_id": (
        lambda value: isinstance(value, str) and value != "",
        "the text that identifies a save",
    ),
    "run_id": (lambda value: isinstance(value, str), "the text that identifies a run"),
    "files": (
        _is_file_table,
        f"a table with bytes and crc32 of each file, {INDEX_FILE} among them",
    ),
    "world_size": (lambda value: _is_count(value) and value > 0, "a number of ranks"),
    "progress": (_is_progress, "a table of counters with step and samples"),
    "optimizer": (
        _is_optimizer,
        "a table of num_updates and, with dynamic loss scaling, its four numbers",
    ),
    "spikes": (_is_spikes, "a table of norms, all finite, and in_a_row, a count"),
    **{
        name: (lambda value: isinstance(value, dict), "a table")
        for name in ("versions", "config", "identity", "engine", "client_state")
    },
}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:100] + " ..."


# ---- Verifying all files, for instance after a copy. (Loading compares the chunks that it reads.)


def damaged_files(path: Path) -> Iterator[str]:
    """Yield a sentence for each file of the checkpoint at `path` whose size or checksum differs from the saved one.

    Reads everything, each file once. Raises CheckpointError when run.json itself is damaged, or is of format
    1, which has no checksums.
    """
    run = read_run_file(path)
    if "files" not in run:
        raise CheckpointError(
            f"{path} was saved in format {run['format_version']}, without checksums of its "
            "files: it cannot be verified. A checkpoint that this version saves can."
        )
    for name, entry in run["files"].items():
        try:
            size, crc32 = _size_and_crc32(path / name)
        except OSError as error:
            yield f"{path / name} cannot be read: {error.strerror or error}"
            continue
        if size != entry["bytes"]:
            yield f"{path / name} has {size} bytes, and {entry['bytes']} were saved"
        elif crc32 != entry["crc32"]:
            yield f"{path / name} has the CRC-32 {crc32}, and {entry['crc32']} was saved"


def _size_and_crc32(file: Path) -> tuple[int, str]:
    size = crc32 = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            size = size + len(block)
            crc32 = zlib.crc32(block, crc32)
    return size, f"{crc32:08x}"
