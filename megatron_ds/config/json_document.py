"""`JsonDocument`: a DeepSpeed JSON while it is translated to settings."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..errors import ConfigError
from .option import Option, coerce
from .reading import Reading, Setting
from .run import Source, all_options


class JsonDocument(Reading):
    """The reading of one file, with the values of its known keys.

    path    of the file, for messages and sources
    known   dotted key → its option, of all keys that are read
    values  dotted key → its value in the file, of the known keys
    """

    def __init__(self, path: str, known: Mapping[str, Option]):
        super().__init__()
        self.path, self.known = path, known
        self.values: dict[str, Any] = {}

    def take(self, key: str, option: Option | None = None) -> Any:
        """The value of a key; None if it is absent or "auto", or if it is wrong, which is noted as a problem.
        """
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
            self.settings.append(Setting(path, value, Source("deepspeed", f"{self.path} {key}")))

    def is_auto(self, key: str) -> bool:
        """Whether the value of the key is "auto"."""
        return self.values.get(key) == "auto"

    def refuse_params(self, block: str, kind: str, allowed: set[str]) -> None:
        """A problem for each of the block's `params` that its type does not have."""
        for key in self.values:
            name = key.removeprefix(f"{block}.params.")
            if name != key and name not in allowed:
                self.refuse(f'{self.path}: "{key}" does not apply to the {block} {kind}, which has '
                            f"{', '.join(sorted(allowed))}. Remove it.")


@cache
def declared_keys() -> Mapping[str, Option]:
    """Dotted key → the option that declares it."""
    return {option.json: option for option in all_options().values() if option.json}


def paths_of(key: str) -> set[str]:
    """The options that a key sets; all of a section for a translated key, which several options may depend
    on.
    """
    if key in declared_keys():
        return {declared_keys()[key].path}
    block = key.partition(".")[0]
    section = "optimizer" if block in ("scheduler", "fp16") else block
    return {path for path in all_options() if path.startswith(section + ".")}
