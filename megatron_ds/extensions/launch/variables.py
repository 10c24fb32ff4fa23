"""Environment variables that the ranks of all nodes get: those that the launcher has, and those of a file.

DeepSpeed's file `.deepspeed_env` has lines KEY=VALUE. It is read in the home folder and in the current one, whose
lines win; DS_ENV_FILE is another name for it, or a path, and may name a file that is not there.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError
from ...host.regular_file import read_text

PREFIXES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "FI_",
    "GLOO_",
    "HF_",
    "MEGATRON_DS_",
    "MLFLOW",
    "MV2",
    "NCCL",
    "OMP_NUM_THREADS",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
    "UCX",
    "WANDB",
)
FILE = ".deepspeed_env"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported_variables(
    environ: Mapping[str, str], home: Path, folder: Path
) -> dict[str, str]:
    """Return the variables of `environ` whose names begin with one of PREFIXES, then those of the files."""
    found = {
        name: value for name, value in environ.items() if name.startswith(PREFIXES)
    }
    for path in env_paths(environ.get("DS_ENV_FILE", FILE), home, folder):
        found |= read_variables(path)
    # as DeepSpeed: modules beside the script are found
    given = found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), given)))
    return found


def env_paths(name: str, *folders: Path) -> list[Path]:
    """Return the files of that name in the folders; an absolute name is the path itself."""
    paths = dict.fromkeys(folder / name for folder in folders)
    return [path for path in paths if path.is_file()]


def read_variables(path: Path) -> dict[str, str]:
    """Return the variables of a file; blank lines and those that begin with # are skipped.

    Quotes around a whole value are removed. Raises ConfigError for a line that is none of these.
    """
    try:
        lines = read_text(path, ConfigError).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    found = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not NAME.fullmatch(name.strip()) or "\0" in value:
            raise ConfigError(f"{path}, line {number}: {line!r} is not NAME=VALUE.")
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if is_quoted else value
