"""Copies of the tokenizer's files next to the checkpoints, so that a model can be used without the originals.

    runs/a/tokenizer-3f09c2d1a8b4/tokenizer_model/tokenizer.json     copies of what --tokenizer-model names
    runs/a/iter_0000100/run.json
        "tokenizer_files": {"tokenizer_model": "tokenizer-3f09c2d1a8b4/tokenizer_model/tokenizer.json"}

The folder name contains a hash of the files, so a run with another tokenizer in the same folder overwrites
nothing. If --tokenizer-model is a folder, only the files of a tokenizer are copied, since Hugging Face
folders may contain weights too. A tokenizer without files, such as a user-defined one, needs no copies.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ..config import RunConfig
from ..errors import CheckpointError
from ..host import regular_file
from .folder import local_copy, write_directory
from .place import place_of
from .save_folder import TOKENIZERS

FIELDS = ("vocab_file", "merge_file", "tokenizer_model")
# have the end-of-document token
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
CHAT = "chat_template.jinja"  # of conversations
OF_A_FOLDER = (
    "tokenizer.json",
    CONFIG,
    MAP,
    CHAT,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
MODEL = "config.json"
ENDS = ("generation_config.json", MODEL)  # have the tokens that end a text
KEY = "tokenizer_files"  # in run.json


def keep_tokenizer_files(config: RunConfig) -> dict:
    """Copy the files into the --save folder unless it has them. Called by rank 0, once per start.

    Returns an entry for run.json, {KEY: {field: path relative to the folder}}; {} without files or without
    --save. Raises CheckpointError when the files cannot be copied.
    """
    given = {
        field: Path(path)
        for field in FIELDS
        if (path := getattr(config.data, field)) and os.path.exists(path)
    }
    if not config.checkpoint.save or not given:
        return {}
    folder = place_of(config.checkpoint.save)
    # The name is a hash of the contents: a folder that holds them is used again.
    try:
        contents = {}
        for field, path in given.items():
            for file in _files_at(path):
                contents[f"{field}/{file.name}"] = regular_file.read_regular(
                    file, CheckpointError
                )
        name = TOKENIZERS.replace("*", _hash_of(contents))
        if not _holds(folder / name, contents):
            write_directory(folder / name, contents)
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: the files of the tokenizer cannot be copied there: "
            f"{error}."
        ) from error
    ends = {
        field: "" if path.is_dir() else f"/{path.name}" for field, path in given.items()
    }
    return {KEY: {field: f"{name}/{field}{end}" for field, end in ends.items()}}


def named_copies(directory: Path, run: Mapping) -> dict[str, str]:
    """{field: path relative to the folder} of the copies that run.json names.

    Raises CheckpointError for paths outside of the folder.
    """
    named = run.get(KEY) or {}
    is_table = isinstance(named, dict) and set(named) <= set(FIELDS)
    if not is_table or not all(map(_is_below, named.values())):
        raise CheckpointError(
            f"run.json of {directory} is damaged: {KEY} is not a table of paths in that "
            "folder."
        )
    return named


def local_copies(directory: Path, run: Mapping) -> dict[str, str]:
    """{field: path} of the copies that run.json names; {} unless all exist. Those in a store are downloaded."""
    named = named_copies(directory, run)
    if not all((directory / path).exists() for path in named.values()):
        return {}
    tops = {PurePosixPath(path).parts[0] for path in named.values()}
    folders = {top: local_copy(directory / top) for top in tops}
    return {
        field: str(folders[top].joinpath(*rest))
        for field, (top, *rest) in (
            (field, PurePosixPath(path).parts) for field, path in named.items()
        )
    }


def _is_below(path: object) -> bool:
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    return bool(parts) and not {"/", ".."} & set(parts)


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        names = (*OF_A_FOLDER, *ENDS)
        return [path / name for name in names if (path / name).is_file()]
    return [
        path,
        *(
            beside
            for name in (CONFIG, MAP, CHAT, *ENDS)
            if (beside := path.with_name(name)).is_file() and path.name != name
        ),
    ]


def _hash_of(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(contents.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


def _holds(folder: Path, contents: Mapping[str, bytes]) -> bool:
    return all(
        (folder / name).is_file() and (folder / name).read_bytes() == data
        for name, data in contents.items()
    )
