"""`run.json`: what a checkpoint says of the run that wrote it, in plain JSON.

    format_version   of the checkpoint; a reader refuses a later one
    step             optimizer steps done
    versions         of python and torch that wrote it; informative
    ...              whatever the trainer adds: config, progress, identity of model and data, scaler state
"""

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import CheckpointError
from .folder import RUN_FILE, read_regular, write_durably

FORMAT_VERSION = 1


def run_text(step: int, run: Mapping) -> str:
    """The file's text. Raises TypeError when `run` holds something that is no plain value."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return json.dumps({"format_version": FORMAT_VERSION, "step": step, "versions": versions, **run}, indent=2) + "\n"


def write_run_file(path: Path, text: str) -> None:
    write_durably(path / RUN_FILE, text)


def read_run_file(path: Path) -> dict:
    """Raises CheckpointError when it is missing, damaged, or of a format that came later."""
    file = path / RUN_FILE
    try:
        run = json.loads(read_regular(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    version = run.get("format_version") if isinstance(run, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{file} is damaged: it does not say its format_version.")
    if version > FORMAT_VERSION:
        raise CheckpointError(f"{file} is of format {version}; this version reads formats up to {FORMAT_VERSION}. Load it "
                              "with the version that wrote it, or a newer one.")
    return run
