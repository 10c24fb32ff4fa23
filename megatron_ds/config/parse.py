"""`parse`: the way in. Command line → files → merge → rules → `RunConfig`."""

import os
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

from .deepspeed import read_deepspeed
from .flags import read_flags
from .help import help_text
from .launched import rank_in
from .merge import merge
from .problems import attempt, reject
from .rules import Rule, check
from .run import RunConfig, Source
from .setting import Setting
from .yaml_file import names, read_yaml


def parse(argv: Sequence[str], world_size: int = 1, *, defaults: Mapping[str, Any] | None = None,
          known: Mapping[str, Container[str]] | None = None, rules: Sequence[Rule] = (),
          env: Mapping[str, str] | None = None) -> RunConfig:
    """The configuration said by `argv`, for `world_size` ranks. Raises one ConfigError with everything that is wrong.

    defaults: field name → value, what an entry script prefers; files and flags win over it.
    known: path → names that the option may have, for options that name an entry of a registry (registries lie in the layers
    above): {"parallel.pipeline_schedule": SCHEDULES}.
    rules: more functions from the config to problems, for what only the layers above can judge; asked when all else is right.
    `--help` prints, on rank 0 of the launcher's environment, and exits with code 0.
    """
    config = read(argv, world_size, defaults=defaults, env=env)
    check(config, known, rules)
    return config


def read(argv: Sequence[str], world_size: int = 1, *, defaults: Mapping[str, Any] | None = None,
         env: Mapping[str, str] | None = None) -> RunConfig:
    """What the words and the files that they name say, before any rule: for a tool that needs a part of a run's flags."""
    line = read_flags(argv)
    if line.wants_help:
        if rank_in(os.environ if env is None else env) == 0:
            sys.stdout.write(help_text())
        raise SystemExit(0)
    problems = list(line.problems)
    files = []
    for path in line.yaml_files:
        files += attempt(problems, read_yaml, path) or []
    for path in line.deepspeed_files:
        files += attempt(problems, read_deepspeed, path) or []
    scripted = [Setting(names()[name].path, value, Source("script", "the script")) for name, value in (defaults or {}).items()]
    config = attempt(problems, merge, files, line.settings, world_size, scripted)
    reject(problems)               # before the rules, to whom a value that could not be read would look like a missing one
    return config
