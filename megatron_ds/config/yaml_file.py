"""A YAML file (`--config`) → settings.

    num_layers: 12                  a field by its name, or by any flag's name without the hyphens,
    optimizer:                      bare or inside its section
      lr: 6e-4
    data_path: [0.3, books, 0.7, web]

Scalars are read as written and coerced by the option's type, since YAML 1.1 takes 1e-4 for a text, 010 for eight and 1:30 for
ninety. A checkpoint's run.json is such a file too: it holds the whole configuration under `config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .coerce import coerce
from .flags import spellings
from .option import Option
from .problems import reject
from .run import SECTIONS, Source, all_options
from .setting import Setting

NULL = "tag:yaml.org,2002:null"
RECORDS = ("world_size", "sources")      # in a run.json, what was, not what is wanted


def read_yaml(path: str) -> list[Setting]:
    """Raises one ConfigError with everything that is wrong; it never builds Python objects from the file."""
    import yaml
    wrong: list[str] = []
    try:
        root = yaml.compose(text_of(path, "--config"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_what(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is not a file of settings: its brackets are nested too deep.") from None
    settings = [] if root is None else list(_top(path, root, wrong))
    reject(wrong)
    return settings


def _what(error: Any) -> str:
    """A YAMLError in one line: ":2: this is not YAML: expected …"."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    return f"{line}: this is not YAML: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"


def text_of(path: str, flag: str) -> str:
    """The text of a file named by a flag."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")         # with or without the mark that Windows writes
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: this is not a text file.") from None
    except OSError as error:
        where = "" if Path(path).is_absolute() else f", looked for in {Path.cwd()}"
        raise ConfigError(f"{flag} {path}: {error.strerror.lower()}{where}.") from None


def _top(path: str, root: Any, wrong: list[str]) -> Iterator[Setting]:
    if root.id != "mapping":
        wrong.append(f"{path} holds no `name: value` lines, but a {root.id}.")
        return
    inner = _by_key(root)
    if "format_version" in inner and "config" in inner and inner["config"].id == "mapping":
        root = inner["config"]                                        # a run.json
    ignored = RECORDS if set(RECORDS) <= set(_by_key(root)) else ()
    for name, value, line in _entries(path, root, wrong):
        if name in SECTIONS and value.id == "mapping":
            for field, inner_value, inner_line in _entries(path, value, wrong):
                yield from _setting(Entry(path, inner_line, field, inner_value, name), wrong)
        elif name not in ignored:
            yield from _setting(Entry(path, line, name, value), wrong)


def _by_key(mapping: Any) -> dict[str, Any]:
    return {str(key.value): value for key, value in mapping.value}


def _entries(path: str, mapping: Any, wrong: list[str]) -> Iterator[tuple[str, Any, int]]:
    """(key, value, line number); a key that stands twice is wrong, where YAML itself would keep the last."""
    first: dict[str, int] = {}
    for key, value in mapping.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in first:
            wrong.append(f"{path}:{line}: {name} stands here and on line {first[name]} too. Keep one.")
        else:
            first[name] = line
            yield name, value, line


def _setting(entry: Entry, wrong: list[str]) -> Iterator[Setting]:
    """None for an empty value: `lr:` leaves lr to the other sources."""
    try:
        option = entry.option()
        if entry.value.tag != NULL:
            value = coerce(option, entry.plain(), f"{entry.where}: {entry.name}")
            yield Setting(option.path, value, Source("yaml", entry.where))
    except ConfigError as error:
        wrong.append(str(error))


@dataclass(frozen=True)
class Entry:
    """A `name: value` of the file; `section` is None for a bare one."""

    path: str
    line: int
    name: str
    value: Any
    section: str | None = None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def plain(self) -> Any:
        """The value as written: a text, or a list of texts."""
        if self.value.id == "sequence" and all(item.id == "scalar" for item in self.value.value):
            return [item.value for item in self.value.value]
        if self.value.id != "scalar":
            raise ConfigError(f"{self.where}: {self.name} needs {self.option().noun}, but there is a block under it.")
        return self.value.value

    def option(self) -> Option:
        """The option that the name means. Raises ConfigError with the nearest one."""
        name = self.name.replace("-", "_")
        option = names().get(name)
        if option is not None and self.section in (None, option.section):
            return option
        if option is not None:
            raise ConfigError(f"{self.where}: {self.name} belongs to the section {option.section}, not to {self.section}.")
        switch = spellings().get("--" + name.replace("_", "-"))
        if switch is not None:
            raise ConfigError(f"{self.where}: {self.name} is a flag without a value; in a file write "
                              f"{switch.option.name}: {switch.value}.")
        known = [key for key, o in names().items() if self.section in (None, o.section)]
        near = did_you_mean(name, known) or did_you_mean(name, list(names()))
        raise ConfigError(f"{self.where}: unknown key {self.name!r}{near or '. All of them are in docs/flags.md.'}")


@cache
def names() -> Mapping[str, Option]:
    """Key → option: the field's name, and each flag that takes a value, with underscores."""
    table = {option.name: option for option in all_options().values()}
    assert len(table) == len(all_options()), "two sections have a field of the same name"
    for option in all_options().values():
        for flag in (option.flag, *option.flags):
            table.setdefault(flag[2:].replace("-", "_"), option)
    return table
