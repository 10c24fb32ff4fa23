"""The files of the tokenizer, copied beside the checkpoints: a trained model works where the originals are gone.

    runs/a/tokenizer-3f09c2d1a8b4/tokenizer_model/tokenizer.json     copies of what --tokenizer-model names
    runs/a/iter_0000100/run.json     "tokenizer_files": {"tokenizer_model": "tokenizer-3f09c2d1a8b4/tokenizer_model"}

The name holds a hash of the files, so a run with another tokenizer in the same folder replaces nothing. Of a folder only files
that belong to a tokenizer are copied: a folder of Hugging Face may hold weights, too. A tokenizer without files, such as one
of the user's own, needs no copies.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ..checkpoint.folder import sync_directory
from ..checkpoint.save_folder import TOKENIZERS
from ..config import RunConfig
from ..data.tokenizers import Tokenizer, build_tokenizer
from ..errors import CheckpointError

FIELDS = ("vocab_file", "merge_file", "tokenizer_model")
CONFIG = "tokenizer_config.json"                            # names the end of a document; read beside tokenizer.json
OF_A_FOLDER = ("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
               "vocab.txt", "tokenizer.model", "spiece.model")
KEY = "tokenizer_files"                                     # of run.json


def keep_tokenizer_files(config: RunConfig) -> dict:
    """Copy the files into the --save folder, unless they are there; what run.json says of them.

    Rank 0 calls it, once a run. Returns {KEY: {field: path below the folder}}, {} without files or without --save.
    Raises CheckpointError when they cannot be copied.
    """
    given = {field: Path(path) for field in FIELDS if (path := getattr(config.data, field)) and os.path.exists(path)}
    if not config.checkpoint.save or not given:
        return {}
    folder = Path(config.checkpoint.save)
    try:
        contents = {f"{field}/{file.name}": file.read_bytes() for field, path in given.items() for file in _files_at(path)}
        name = TOKENIZERS.replace("*", _hash_of(contents))
        if not _holds(folder / name, contents):
            _write(folder / name, contents)
    except OSError as error:
        raise CheckpointError(f"--save {folder}: the files of the tokenizer cannot be copied there: {error}.") from error
    ends = {field: "" if path.is_dir() else f"/{path.name}" for field, path in given.items()}
    return {KEY: {field: f"{name}/{field}{end}" for field, end in ends.items()}}


def tokenizer_of(directory: str | os.PathLike, run: Mapping, config: RunConfig, given: Mapping[str, str]) -> Tokenizer:
    """The tokenizer of a checkpoint: from the files `given` now, else from the copies, else from the original paths.

    directory: the folder of checkpoints.  run: the content of run.json, and config: its config.  given: {field: path}.
    Raises CheckpointError when no file is left, or when it is another tokenizer than the run had.
    """
    copies = {} if given else _copies(Path(directory), run)
    paths = {**copies, **given}
    data = replace(config.data, **paths)
    missing = [field for field in FIELDS if (path := getattr(data, field)) and not os.path.exists(path) and field not in given]
    if missing:
        flags = [f"--{field.replace('_', '-')}" for field in missing]
        named = " and ".join(f"{flag} {getattr(data, field)}" for flag, field in zip(flags, missing))
        raise CheckpointError(f"run.json of {directory} names {named}, which does not exist here, and there is no copy beside "
                              f"the checkpoints. Give the tokenizer that the run had with {' and '.join(flags)}.")
    tokenizer, wanted = build_tokenizer(data, config.model), run["identity"]["tokenizer"]["fingerprint"]
    if tokenizer.fingerprint != wanted:
        where = ", ".join(str(getattr(data, field)) for field in FIELDS if getattr(data, field)) or "that type"
        raise CheckpointError(f"the tokenizer of {where} is {tokenizer.fingerprint}, and {directory} was trained with "
                              f"{wanted}: the same ids mean other text. Give the files of that one with --tokenizer-model, "
                              "or with --vocab-file and --merge-file.")
    return tokenizer


def _copies(directory: Path, run: Mapping) -> dict[str, str]:
    """The paths of the copies that run.json names, if all of them are there."""
    named = run.get(KEY) or {}
    if not isinstance(named, dict) or not set(named) <= set(FIELDS) or not all(map(_is_below, named.values())):
        raise CheckpointError(f"run.json of {directory} is damaged: {KEY} is not a table of paths in that folder.")
    paths = {field: str(directory / path) for field, path in named.items()}
    return paths if all(map(os.path.exists, paths.values())) else {}


def _is_below(path: object) -> bool:
    return isinstance(path, str) and not {"/", ".."} & set(PurePosixPath(path).parts)


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / name for name in OF_A_FOLDER if (path / name).is_file()]
    beside = path.with_name(CONFIG)
    return [path, beside] if beside.is_file() and path.name != CONFIG else [path]


def _hash_of(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(contents.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


def _holds(folder: Path, contents: Mapping[str, bytes]) -> bool:
    return all((folder / name).is_file() and (folder / name).read_bytes() == data for name, data in contents.items())


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Beside, synced, then renamed: the folder is complete or not there. A damaged one is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        beside.mkdir()
        for name, data in contents.items():
            (beside / name).parent.mkdir(exist_ok=True)
            with open(beside / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for place in (*{(beside / name).parent for name in contents}, beside):
            sync_directory(place)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(beside, folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
