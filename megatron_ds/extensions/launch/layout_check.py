"""Whether a command line of this package's training is right for a number of ranks, before it is started."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config import parse
from ...errors import ConfigError
from ...features import Provided
from ...host.regular_file import read_text

ELASTIC_CHECK: Provided[Any] = Provided("elastic check")
ELASTIC_ENABLED: Provided[Any] = Provided("elastic enabled")

SCRIPTS = {"pretrain_gpt.py": {}, "pretrain_bert.py": {"model": "bert"}}
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config")
COMMANDS = {"train": {}, "train-bert": {"model": "bert"}}


class LayoutCheck:
    """words: the program and its arguments; world_size: of the first start, for which they are taken to be right"""

    def __init__(self, words: Sequence[str], world_size: int):
        self._found = _training(words)
        self._elastic = None if self._found else _elastic_file(words)
        # A program may have the name of ours and other flags: if they are wrong at the start, it is not ours.
        if self.problem(world_size):
            self._found = None

    def problem(self, world_size: int) -> str:
        """Return what is wrong with so many ranks; "" for nothing, and for a program of the user.

        Such a program is checked by the section "elasticity" of its --deepspeed_config, if that has one.
        """
        if self._elastic is not None:
            return _elastic_problem(self._elastic, world_size)
        if self._found is None:
            return ""
        arguments, defaults = self._found
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                parse(arguments, world_size, defaults=defaults, env={})
        except ConfigError as error:
            return f"With {world_size} ranks: {error}"
        except SystemExit:  # --help
            return ""
        return ""


def _elastic_file(words: Sequence[str]) -> dict | None:
    """Return the JSON of --deepspeed_config, if elasticity is switched on in it."""
    pairs = [
        *zip(words, words[1:]),
        *(word.split("=", 1) for word in words if "=" in word),
    ]
    paths = [value for name, value in pairs if name in CONFIG_FLAGS]
    try:
        found = json.loads(read_text(paths[-1], ConfigError)) if paths else None
    except (OSError, ValueError):  # ConfigError is one: the ranks print it
        return None
    enabled = ELASTIC_ENABLED.find()
    is_elastic = isinstance(found, dict) and enabled is not None and enabled(found)
    return found if is_elastic else None


def _elastic_problem(ds_config: dict, world_size: int) -> str:
    check = ELASTIC_CHECK.find()
    assert check is not None  # the feature that has one has the other
    try:
        check(ds_config, world_size=world_size)
    except ConfigError as error:
        return f"With {world_size} ranks: {error}"
    return ""


def _training(words: Sequence[str]) -> tuple[list[str], dict] | None:
    """(arguments, defaults) of a training of this package; None for another program."""
    name = Path(words[0]).name
    arguments = list(words[1:])
    if name in SCRIPTS:
        return arguments, SCRIPTS[name]
    if name in ("megatron_ds", "megatron-ds") and arguments[:1] in (
        [command] for command in COMMANDS
    ):
        return arguments[1:], COMMANDS[arguments[0]]
    return None
