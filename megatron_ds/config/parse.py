"""`parse`: the command line → a `RunConfig`. Flags and files are read, combined, and checked by all rules.

All problems are reported at once, before anything is built. A rule is a function from the config to the
problems that it finds, listed at the end of its module. Each problem states the numbers and their sources,
why they are wrong, and the valid alternatives. A rule yields nothing if a value that it needs is missing,
because `missing` reports that.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

from ..errors import ConfigError
from ..features import Later, features
from ..launch_env import problems_of_local_rank, rank_in
from ..registry import Registry
from ..version import __version__
from .messages import Rule, either, flag, problems_of, written
from .rules.chosen import layout_rules, model_rules
from .rules.data import DATA_RULES
from .rules.need import NEED_RULES
from .rules.training import TRAINING_RULES
from .run import RunConfig, Source, all_options
from .sources.combine import combined, contradictions
from .sources.flags import CommandLine, read_flags, spellings
from .sources.foreign_words import foreign_words
from .sources.keys import names
from .sources.named_features import import_named
from .sources.reading import Setting, SourceReading, attempt, reject

# Path of an option that names an entry → the entries.
KnownNames = Mapping[str, Registry[Any] | Mapping[str, Any]]
# What --help and --config print and read is loaded for them.
HELP = {
    "help": Later(__package__, ".sources.config_text:help_text"),
    "short help": Later(__package__, ".sources.config_text:short_help_text"),
}


def parse(
    argv: Sequence[str],
    world_size: int = 1,
    *,
    defaults: Mapping[str, Any] | None = None,
    known: KnownNames | None = None,
    rules: Sequence[Rule] = (),
    env: Mapping[str, str] | None = None,
    settings: Sequence[Setting] = (),
) -> RunConfig:
    """Return the configuration that `argv` describes, for `world_size` ranks.

    defaults  field name → value: the defaults of an entry script. Files and flags override them
    known     path → the names that the option may have, for options that name an entry of a registry of a
              layer above: {"parallel.pipeline_schedule": SCHEDULES}
    rules     functions from the config to problems, for checks that need a layer above. They are called if no
              other problem was found
    env       the launcher's environment. Rank 0 prints the text of --help, --version and --print-config, and
              all ranks exit with code 0
    settings  of another source, such as a checkpoint; they override `defaults` alone

    Raises one ConfigError with all problems.
    """
    config, line, readings, problems = _read_all(
        argv, world_size, defaults, env, settings
    )
    # What seems to be missing may be in a file that cannot be read: its problems come first.
    if not all(reading.is_complete for reading in readings):
        reject(problems)
    check(
        config,
        known,
        rules,
        problems,
        unread=set().union(*(reading.unread for reading in readings)),
    )
    if line.asks_for == "config":
        from .sources.config_text import to_yaml

        _print_and_exit(to_yaml(config), env)
    return config


def read(
    argv: Sequence[str],
    world_size: int = 1,
    *,
    defaults: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> RunConfig:
    """`parse` without rules, for a tool that needs only some of a run's options."""
    config, _, _, problems = _read_all(argv, world_size, defaults, env)
    reject(problems)
    return config


def version_text() -> str:
    """Return the versions of this package, torch and Python, in one line. Does not import torch."""
    try:
        torch = version_of("torch")
    except PackageNotFoundError:
        torch = "not installed"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"megatron_ds {__version__}, torch {torch}, Python {python}"


def _read_all(
    argv: Sequence[str],
    world_size: int,
    defaults: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    settings: Sequence[Setting] = (),
) -> tuple[RunConfig, CommandLine, list[SourceReading], list[str]]:
    """Return (the configuration, the command line, one reading for it and for each file, their problems)."""
    import_named(argv)
    line = read_flags(argv)
    if line.asks_for in HELP:
        _print_and_exit(HELP[line.asks_for](), env)
    if line.asks_for == "version":
        _print_and_exit(version_text() + "\n", env)
    foreign = foreign_words()
    # Each file is one of this package where no dialect is installed.
    yamls: list[SourceReading] = []
    if line.yaml_files and foreign.read_yamls is not None:
        yamls = foreign.read_yamls(line.yaml_files)
    elif line.yaml_files:
        from .sources.config_files import read_yaml

        yamls = [read_yaml(path) for path in line.yaml_files]
    jsons = [foreign.read_deepspeed(path) for path in line.deepspeed_files]
    readings = [line, *yamls, *jsons]
    config, problems = assembled(line, readings[1:], world_size, defaults, settings)
    if line.is_strict:
        problems += [
            f"{name} changes nothing here: {why}. Remove it, or remove --strict-flags."
            for name, why in config.without_effect.items()
        ]
    problems += problems_of_local_rank(
        os.environ if env is None else env, line.local_rank
    )
    return config, line, readings, problems


def assembled(
    line: CommandLine,
    files: Sequence[SourceReading],
    world_size: int,
    defaults: Mapping[str, Any] | None = None,
    settings: Sequence[Setting] = (),
) -> tuple[RunConfig, list[str]]:
    """Return (the configuration that a command line and its files describe, the problems of reading them).

    defaults, settings: as of `parse`
    """
    of_files = [setting for reading in files for setting in reading.settings]
    source = Source("script", "the script")
    scripted = [
        Setting(names()[name].path, value, source)
        for name, value in (defaults or {}).items()
    ]
    config = combined(of_files, line.settings, world_size, [*scripted, *settings])
    # Notes and problems of the command line come before those of the files.
    notes: dict[str, str] = {}
    problems = []
    for reading in (line, *files):
        notes |= reading.without_effect
        problems += reading.problems
    return config.with_notes(notes), [
        *problems,
        *contradictions(of_files, line.settings),
    ]


def _print_and_exit(text: str, env: Mapping[str, str] | None) -> None:
    if rank_in(os.environ if env is None else env) == 0:
        sys.stdout.write(text)
    raise SystemExit(0)


def check(
    config: RunConfig,
    known: KnownNames | None = None,
    rules: Sequence[Rule] = (),
    problems: Sequence[str] = (),
    unread: Collection[str] = (),
) -> None:
    """Raise one ConfigError with all problems, if there are any.

    known, rules  see `parse`
    problems      found while the sources were read
    unread        paths of options whose value could not be read. They have their defaults here, so problems
                  that mention one of them are left out
    """
    own = (
        *NEED_RULES,
        *layout_rules(config),
        *model_rules(config),
        *TRAINING_RULES,
        *DATA_RULES,
        *(rule for feature in features() for rule in feature.rules),
    )
    found = [*problems_of(own, config), *unknown_names(config, known or {})]
    reject(
        [
            *problems,
            *missing(config, unread),
            *(p for p in found if not _names_one_of(p, unread)),
        ]
    )
    # Rules of layers above rely on the ones before, so they come last.
    higher: list[str] = []
    for rule in rules:
        higher += attempt(higher, lambda rule=rule: list(rule(config))) or []
    reject(higher)


def _names_one_of(problem: str, paths: Collection[str]) -> bool:
    flags = set(re.findall(r"--[a-zA-Z0-9_-]+", problem))
    return any(
        spelling.option.path in paths
        for flag, spelling in spellings().items()
        if flag in flags
    )


def missing(config: RunConfig, unread: Collection[str] = ()) -> Iterator[str]:
    """Yield one problem with all required options that have no value."""
    names = [
        option.flag
        for path, option in all_options().items()
        if option.required and config.get(path) is None and path not in unread
    ]
    if names:
        yield (
            f"missing: {', '.join(names)}. Give {'it' if len(names) == 1 else 'them'} as flags or in a "
            "--config file."
        )


def unknown_names(config: RunConfig, known: KnownNames) -> Iterator[str]:
    """Yield the names that are not in their registry. known: path of the option → the registry."""
    for path, registry in known.items():
        name = config.get(path)
        if name is not None and name not in registry:
            try:
                registry[name]
            except ConfigError as error:
                yield f"{written(config, path)}: {error}"
            except KeyError:
                yield f"{written(config, path)} is unknown. {flag(path)} may be {either(list(registry))}."
