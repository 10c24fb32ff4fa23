"""Programs that import `deepspeed` get this package, without a change of the program.

python -m megatron_ds.as_deepspeed script.py …                     # one process
python -m megatron_ds.as_deepspeed -m torch.distributed.run --nproc-per-node 2 script.py …
python -m megatron_ds.as_deepspeed -m accelerate.commands.launch --config_file zero3.yaml script.py …
export PYTHONPATH=$(python -m megatron_ds.as_deepspeed):$PYTHONPATH     # all that this shell starts

The words are those of `python`, as which the command goes on. Without words it prints the folder for PYTHONPATH,
which has a module `deepspeed` and the metadata of a distribution of this name. They are found before an
installed DeepSpeed, in the program and in all processes that it starts.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...cli import Arguments
from ...errors import ConfigError

FOLDER = Path(__file__).parent / "search_path"
WITH_VALUE = ("-W", "-X")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folder, or become the program that the words name. Raises ConfigError."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        print(FOLDER)
        return 0
    if words[0] in ("-h", "--help"):
        Arguments(__doc__).print_help()
        return 0
    if sys.flags.ignore_environment:
        raise ConfigError(
            "Python was started with -E or -I, which ignore PYTHONPATH, where programs find the module deepspeed. "
            "Start it without them."
        )
    command = [sys.executable, *python_flags(sys.orig_argv[1:]), *words]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment_with_name(os.environ))


def environment_with_name(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the variables with which Python imports this package as `deepspeed`."""
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [place for place in given if place and place != str(FOLDER)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *others])}


def python_flags(line: Sequence[str]) -> list[str]:
    """Python's own flags at the start of its command line, in front of `-m MODULE` or of a script."""
    flags = []
    words = iter(line)
    for word in words:
        if not word.startswith("-"):
            break
        has_value = word.startswith(WITH_VALUE)
        letters, ends, _ = (word, "", "") if has_value else word.partition("m")
        if letters != "-":  # -u of -um
            flags.append(letters)
        if ends:
            break
        if word in WITH_VALUE:
            flags.append(next(words))
    return flags
