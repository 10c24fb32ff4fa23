"""The configuration as text for people and as plain values for run.json."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .help import value_text
from .run import SECTIONS, RunConfig, Source, all_options, non_default

WIDEST = 48                                                 # column; a longer value sticks out


def report_non_default(config: RunConfig) -> str:
    """A table of every value that is not the default, by section, with where it came from.

        not at their defaults:
          model      num_layers    12      gpt.yaml:3
          optimizer  lr            0.0006  --lr
    """
    rows = [(option.section, option.name, value_text(value), config.source(option.path))
            for option, value in non_default(config)]
    if not rows:
        return "every option is at its default"
    widths = [min(WIDEST, max(len(row[column]) for row in rows)) for column in range(3)]
    lines, above = ["not at their defaults:"], ""
    for section, *cells in rows:
        cells = [cell.ljust(width) for cell, width in zip(("" if section == above else section, *cells), [*widths, 0])]
        lines.append(("  " + "  ".join(cells)).rstrip())
        above = section
    return "\n".join(lines)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values, ready for JSON: each section, the world size, and the sources as {path: [kind, name]}."""
    sections = {section: {name: list(value) if isinstance(value, tuple) else value
                          for name, value in asdict(getattr(config, section)).items()} for section in SECTIONS}
    return {**sections, "world_size": config.world_size,
            "sources": {path: [source.kind, source.name] for path, source in config.sources.items()}}


def from_dict(saved: Mapping[str, Any]) -> RunConfig:
    """The config that `to_dict` wrote. Fields that did not exist yet get their defaults; unknown ones raise ConfigError."""
    sections = {section: cls(**_fields(section, saved.get(section, {}))) for section, cls in SECTIONS.items()}
    sources = {path: Source(*words) for path, words in saved.get("sources", {}).items()}
    return RunConfig(**sections, world_size=saved.get("world_size", 1), sources=sources)


def _fields(section: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = [option.name for option in all_options().values() if option.section == section]
    for name in saved:
        if name not in names:
            raise ConfigError(f"the saved configuration has {section}.{name}, which this version does not know"
                              f"{did_you_mean(name, names) or '.'} It was written by another version.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
