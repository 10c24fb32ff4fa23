"""Files of options: a YAML file (`--config`) → settings, and the parts of a DeepSpeed JSON.

    num_layers: 12                  a field: its name, or any of its flags without the leading hyphens,
    optimizer:                      bare or inside its section
      lr: 6e-4
    data_path: [0.3, books, 0.7, web]

Scalars are read as written and converted by the option's type, since YAML 1.1 reads 1e-4 as a string, 010 as
eight and 1:30 as ninety. A checkpoint's run.json is such a file too: its `config` is a whole configuration.

`JsonDocument` is a DeepSpeed JSON while `deepspeed_json.py` translates it to settings.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...features import missing_wings, per_features, sections_without_features
from ...host.regular_file import read_text
from ..messages import value_text
from ..options.option import Option, coerce
from ..run import RUN, Source, all_options, formerly, name_of_section, sections
from .flags import Spelling, spellings
from .keys import names
from .reading import Setting, SourceReading
from .suggest import near_key

LARGEST = 4 << 20  # bytes; PyYAML takes up to a second for each MB
NULL = "tag:yaml.org,2002:null"
# Keys of a run.json that describe the run which wrote it.
RECORDS = (
    "world_size",
    "sources",
)
IMPORT = "import"  # the key of modules with features
VERSION = "format_version"  # a key of every run.json


def read_yaml(path: str) -> SourceReading:
    """Return the settings and problems of a file. YAML tags construct no Python objects."""
    reading = SourceReading()
    try:
        root = _compose(path)
    except ConfigError as error:
        reading.refuse(error)
        reading.is_complete = False
        return reading
    if root is not None:
        _top(path, root, reading)
    return reading


def imports_in(path: str) -> list[str]:
    """Return the modules that a file names at its top, as `import: package.module`.

    [] for one that cannot be read, and for a run.json: nothing is imported because a checkpoint names it.
    """
    try:
        root = _compose(path)
    except ConfigError:
        return []
    keys = _by_key(root) if getattr(root, "id", "") == "mapping" else {}
    value = None if VERSION in keys else keys.get(IMPORT)
    if value is None:
        return []
    items = value.value if value.id == "sequence" else [value]
    return [str(item.value) for item in items]


def _compose(path: str) -> Any:
    """Return the root node, None for an empty file. Raises ConfigError if the file is not YAML."""
    import yaml

    try:
        return yaml.compose(text_of(path, "--config"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        what = problem or " ".join(str(error).split())
        raise ConfigError(f"{path}{line}: this is not YAML: {what}.") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: this is not a configuration: its brackets are nested too deep."
        ) from None


def text_of(path: str, flag: str) -> str:
    """Return the text of a file that a flag gave. Raises ConfigError."""
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # The text may begin with a byte-order mark.
        return read_text(
            path,
            ConfigError,
            f"{flag} {path}",
            most=LARGEST,
            encoding="utf-8-sig",
        )
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: this is not a text file.") from None
    except OSError as error:
        where = "" if Path(path).is_absolute() else f", looked for in {Path.cwd()}"
        raise ConfigError(
            f"{flag} {path}: {(error.strerror or str(error)).lower()}{where}."
        ) from None


def _top(path: str, root: Any, reading: SourceReading) -> None:
    if root.id != "mapping":
        reading.refuse(
            f"{path} should contain `name: value` lines, but its content is a {root.id}."
        )
        reading.is_complete = False
        return
    # A run.json has the configuration inside.
    config = _by_key(root).get("config")
    is_run = VERSION in _by_key(root) and getattr(config, "id", "") == "mapping"
    kind = RUN if is_run else "yaml"
    left_out: set[str] = set()
    if is_run:
        left_out = _left_out(path, root, reading)
        root = config
    # Sections, and options outside of one.
    ignored = RECORDS if set(RECORDS) <= set(_by_key(root)) else ()
    for name, value, line in _entries(path, root, reading):
        name = name_of_section(name)
        if name in left_out or name == IMPORT and not is_run:
            continue  # what it names was imported before the flags were read
        if name in sections() and value.id == "mapping":
            for field, inner_value, inner_line in _entries(path, value, reading):
                entry = FileEntry(path, inner_line, field, inner_value, name, kind)
                _read(entry, reading)
        elif name not in ignored:
            _read(FileEntry(path, line, name, value, kind=kind), reading)


def _left_out(path: str, root: Any, reading: SourceReading) -> set[str]:
    """Return the sections of a run.json whose features are not loaded, or refuse it."""
    inner = _by_key(root)
    values = {name: _plain(inner.get(name)) for name in ("features", "config")}
    try:
        return sections_without_features(values, path)
    except ConfigError as error:
        reading.refuse(error)
        return set()


def _plain(node: Any) -> Any:
    """Return the value of a node of a run.json; None for a node that is not there."""
    import yaml

    return None if node is None else yaml.SafeLoader("").construct_object(node, True)


def _by_key(mapping: Any) -> dict[str, Any]:
    return {str(key.value): value for key, value in mapping.value}


def _entries(
    path: str, mapping: Any, reading: SourceReading
) -> Iterator[tuple[str, Any, int]]:
    """(key, value, line number). A key that occurs twice is a problem: YAML would keep the last value."""
    first: dict[str, int] = {}
    for key, value in mapping.value:
        name = str(key.value)
        line = key.start_mark.line + 1
        if key.id != "scalar":
            what = "list" if key.id == "sequence" else "block"
            reading.refuse(f"{path}:{line}: a {what} is no key. Write `name: value`.")
        elif name in first:
            reading.refuse(
                f"{path}:{line}: {name} occurs here and on line {first[name]}. Remove one."
            )
        else:
            first[name] = line
            yield name, value, line


def _read(entry: FileEntry, reading: SourceReading) -> None:
    """Add the setting of an entry, or its problem. An empty value, as in `lr:`, sets nothing."""
    option = None
    try:
        option = entry.option()
        if entry.value.tag != NULL:
            value = coerce(option, entry.plain(), f"{entry.where}: {entry.name}")
            reading.settings.append(
                Setting(option.path, value, Source(entry.kind, entry.where))
            )
    except ConfigError as error:
        reading.refuse(error, option.path if option else None)
        if option is None:
            reading.unread |= entry.probably_meant()


@dataclass(frozen=True)
class FileEntry:
    """A `name: value` of the file. section: None outside of a section; kind: of the source."""

    path: str
    line: int
    name: str
    value: Any
    section: str | None = None
    kind: str = "yaml"

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.path}:{self.line}"

    def plain(self) -> Any:
        """Return the value as written: a string or a list of strings. Raises ConfigError for a block."""
        if self.value.id == "sequence" and all(
            item.id == "scalar" for item in self.value.value
        ):
            return [item.value for item in self.value.value]
        if self.value.id != "scalar":
            raise ConfigError(
                f"{self.where}: {self.name} needs {self.option().noun}, but there is a block "
                "under it."
            )
        return self.value.value

    @property
    def switch(self) -> Spelling | None:
        """The flag of this name: a switch, where no option has the name."""
        return spellings().get("--" + self._name.replace("_", "-"))

    def option(self) -> Option:
        """Return the option of this name. Raises ConfigError with a suggestion."""
        option = names().get(self._name)
        switch = self.switch
        if option is not None and self.section in (
            None,
            option.section,
            formerly(option.section),
        ):
            return option
        if option is not None:
            raise ConfigError(
                f"{self.where}: {self.name} belongs in the section {option.section}, not in "
                f"{self.section}."
            )
        if switch is not None:
            raise ConfigError(
                f"{self.where}: {self.name} is a flag without a value; in a file write "
                f"{switch.option.name}: {value_text(switch.value)}."
            )
        raise ConfigError(
            f"{self.where}: unknown key "
            f"{self.name!r}{self._near() or '. All keys are in docs/reference/flags.md.'}{missing_wings()}"
        )

    def probably_meant(self) -> set[str]:
        """Paths of the options that an unknown name probably means."""
        near = self._near()
        meant = {
            option.path
            for name, option in names().items()
            if repr(name) in near or name == self._name
        }
        return meant | ({self.switch.option.path} if self.switch else set())

    @property
    def _name(self) -> str:
        return self.name.replace("-", "_")

    def _near(self) -> str:
        here = {
            name: name
            for name, option in names().items()
            if self.section in (None, option.section)
        }
        return near_key(self.name, here) or near_key(
            self.name, {name: name for name in names()}
        )


class JsonDocument(SourceReading):
    """The reading of one file, with the values of its known keys.

    path    of the file, for messages and sources
    known   dotted key → its option, of all keys that are read
    values  dotted key → its value in the file, of the known keys
    """

    def __init__(self, path: str, known: Mapping[str, Option]):
        super().__init__()
        self.path = path
        self.known = known
        self.values: dict[str, Any] = {}

    def take(self, key: str, option: Option | None = None) -> Any:
        """Return the value of a key; None if it is absent, "auto", or wrong, which is noted as a problem."""
        value = self.values.get(key)
        if value is None or value == "auto":
            return None
        try:
            return coerce(option or self.known[key], value, f'{self.path}: "{key}"')
        except ConfigError as error:
            self.refuse(error)
            self.unread |= paths_of(key)
            return None

    def give(self, path: str, value: Any, key: str) -> None:
        """Set the option `path`, with `key` as its source. None sets nothing."""
        if value is not None:
            self.settings.append(
                Setting(path, value, Source("deepspeed", f"{self.path} {key}"))
            )

    def copy(
        self, key: str, path: str, meaning: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Set the option `path` to the value of the key, as `meaning` translates it."""
        value = self.take(key)
        self.give(path, None if value is None else meaning(value), key)

    def refuse_params(self, block: str, kind: str, allowed: set[str]) -> None:
        """Record a problem for each key in the block's `params` that the type of the block does not have."""
        for key in self.values:
            name = key.removeprefix(f"{block}.params.")
            if name != key and name not in allowed:
                self.refuse(
                    f'{self.path}: "{key}" does not apply to the {block} {kind}, which has '
                    f"{', '.join(sorted(allowed))}. Remove it."
                )


@per_features
def declared_keys() -> Mapping[str, Option]:
    """Dotted key → the option that declares it."""
    return {option.json: option for option in all_options().values() if option.json}


def paths_of(key: str) -> set[str]:
    """Return the options that a key sets; for a translated key, all of a section, since several may depend on it."""
    if key in declared_keys():
        return {declared_keys()[key].path}
    block = key.partition(".")[0]
    section = "optimizer" if block in ("scheduler", "fp16") else block
    return {path for path in all_options() if path.startswith(section + ".")}
