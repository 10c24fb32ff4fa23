"""Tables of settings: values of another program's configuration ↔ options of our models.

    Key("num_key_value_heads", "num_query_groups")          one value each
    Key("hidden_act", "activation", values={"silu": "swiglu"})
    Only("scale_attn_weights", (True,))                     a setting that is computed for some values only
    Fixed("normalization", "RMSNorm")                       an option that has no setting
    Window(…)                                               settings of windows, huggingface/windows.py

`options_of` and `settings_of` apply a table in its two directions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...config.options.model import ModelConfig
from ...errors import CheckpointError

REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """One setting that is one option.

    ours     an attribute of `ModelConfig`; its option has the same name unless `option` is given
    default  their value where the setting is absent or null; None: our option is left at its default
    values   their values → ours; the first of several that mean the same is written. None: equal
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    option: str | None = None

    def option_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {our option: value}. Raises CheckpointError."""
        value = settings.get(self.theirs)
        if value is None:
            value = self.default
        if value is REQUIRED:
            raise CheckpointError(f"{self.theirs} is missing")
        if value is None:
            return {}
        if self.values is not None:
            if (
                not isinstance(value, bool | int | float | str)
                or value not in self.values
            ):
                raise CheckpointError(
                    f"{self.theirs} is {value!r}, and this package computes "
                    f"{' and '.join(map(repr, self.values))}"
                )
            value = self.values[value]
        return {self.option or self.ours: value}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {their setting: value}. A value that they lack becomes their default."""
        value = getattr(model, self.ours)
        if self.values is not None:
            value = next(
                (theirs for theirs, ours in self.values.items() if ours == value),
                self.default,
            )
        return {} if value is REQUIRED else {self.theirs: value}


@dataclass(frozen=True)
class Only:
    """A setting with values that this package computes; others are refused. The first is written and the
    default.

    why  what the other values mean
    """

    theirs: str
    values: tuple
    why: str = ""

    def option_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {}. Raises CheckpointError."""
        value = settings.get(self.theirs, self.values[0])
        if value not in self.values:
            raise CheckpointError(
                f"{self.theirs} is {value!r}"
                f"{f', {self.why}' if self.why else ''}; this package computes "
                f"{' and '.join(map(repr, self.values))} only"
            )
        return {}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {their setting: the first value}."""
        return {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Fixed:
    """An option of ours that all models of a family have; there is no setting of it."""

    ours: str
    value: Any

    @property
    def theirs(self) -> str:
        return ""

    def option_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {our option: the value}."""
        return {self.ours: self.value}

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {}."""
        return {}


class SettingRule(Protocol):
    """An entry of a table, such as those above. theirs: a setting that messages name; "" of an entry without one."""

    @property
    def theirs(self) -> str: ...

    def option_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return {our option: value}. Raises CheckpointError."""
        ...

    def setting_of(self, model: ModelConfig) -> dict[str, Any]:
        """Return {their setting: value}."""
        ...


def options_of(
    table: Sequence[SettingRule], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return our model options. Raises CheckpointError listing all settings that are missing or not computed, and
    those that give one option different values."""
    options: dict[str, Any] = {}
    problems = []
    givers: dict[str, SettingRule] = {}
    for entry in table:
        try:
            found = entry.option_of(settings)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, value in found.items():
            giver = givers.setdefault(name, entry)
            if options.setdefault(name, value) != value:
                problems.append(
                    f"{_name(giver)} and {_name(entry)} differ ({options[name]!r} and "
                    f"{value!r}), and {name} is one option of this package"
                )
    if problems:
        raise CheckpointError("; ".join(problems))
    return options


def _name(entry: SettingRule) -> str:
    return entry.ours if isinstance(entry, Fixed) else entry.theirs


def settings_of(table: Sequence[SettingRule], model: ModelConfig) -> dict[str, Any]:
    """Return their settings."""
    settings: dict[str, Any] = {}
    for entry in table:
        settings |= entry.setting_of(model)
    return settings
