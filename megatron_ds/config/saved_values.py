"""A configuration as plain values, as run.json has it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from ..features import missing_wings
from ..registry import did_you_mean
from .run import (
    RunConfig,
    Source,
    by_field,
    home_of,
    name_of_section,
    options_in,
    sections,
)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values for JSON: each section, the world size, and the sources as {path: [kind, name]}."""
    values = {
        section: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(config.section(section)).items()
        }
        for section in sections()
    }
    return {
        **values,
        "world_size": config.world_size,
        "sources": {
            path: [source.kind, source.name] for path, source in config.sources.items()
        },
    }


def from_dict(saved: Mapping[str, Any], left_out: Collection[str] = ()) -> RunConfig:
    """Return the config that `to_dict` of this or an older version wrote, without the sections `left_out`.

    Raises ConfigError for other sections and fields that are unknown.
    """
    saved = {name_of_section(name): values for name, values in saved.items()}
    for name in saved.keys() - {*sections(), *left_out, "world_size", "sources"}:
        raise ConfigError(
            f"the saved configuration has a section {name}, which does not exist in this version. It was written by "
            f"another version, or with a feature that is not loaded.{missing_wings()}"
        )
    given: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for section in sections():
        for name, value in saved.get(section, {}).items():
            given[home_of(section, name)][name] = value
    values = {
        section: cls(**_fields(section, given[section]))
        for section, cls in sections().items()
    }
    sources = {
        _renamed(path): Source(*source)
        for path, source in saved.get("sources", {}).items()
    }
    return RunConfig(
        **by_field(values), world_size=saved.get("world_size", 1), sources=sources
    )


def _renamed(path: str) -> str:
    section, dot, name = path.partition(".")
    return home_of(name_of_section(section), name) + dot + name


def _fields(section: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = [option.name for option in options_in(section)]
    for name in saved:
        if name not in names:
            raise ConfigError(
                f"the saved configuration has {section}.{name}, which does not exist in this "
                f"version{did_you_mean(name, names) or '.'} It was written by another version.{missing_wings()}"
            )
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in saved.items()
    }
