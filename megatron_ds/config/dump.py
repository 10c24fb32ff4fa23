"""Forms of a configuration: YAML, plain values for run.json, and a list of options without effect."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .option import Option
from .run import RENAMED, SECTIONS, RunConfig, Source, all_options

WIDEST = 48                                                 # widest column; longer values are not aligned


def report_without_effect(config: RunConfig) -> str:
    """A list of accepted flags and keys that change nothing, by reason. Empty if there are none.

        accepted, nothing to do:
          --use-flash-attn, --transformer-impl    kernels are chosen by what the device supports
    """
    by_reason: dict[str, list[str]] = {}
    for name, why in config.without_effect.items():
        by_reason.setdefault(why, []).append(name)
    if not by_reason:
        return ""
    names = {why: ", ".join(listed) for why, listed in by_reason.items()}
    width = min(WIDEST, max(map(len, names.values())))
    rows = [f"  {listed.ljust(width)}  {why}" for why, listed in names.items()]
    return "\n".join(["accepted, nothing to do:", *rows])


def to_yaml(config: RunConfig) -> str:
    """Every option as YAML for `--config`, with its source as a comment."""
    lines = ["# The complete configuration. Use it with --config FILE; flags override it."]
    for section in SECTIONS:
        lines.append(f"\n{section}:")
        for option in all_options().values():
            if option.section == section:
                value = f"  {option.name}: {_yaml_value(option, config.get(option.path))}"
                lines.append(f"{value.rstrip().ljust(WIDEST)}  # {config.source(option.path)}")
    return "\n".join(lines) + "\n"


def _yaml_value(option: Option, value: Any) -> str:
    """Strings are quoted, so that YAML keeps them as they are. None is an empty value, which sets nothing."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml_value(option, item) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values for JSON: each section, the world size, and the sources as {path: [kind, name]}."""
    sections = {section: {name: list(value) if isinstance(value, tuple) else value
                          for name, value in asdict(getattr(config, section)).items()}
                for section in SECTIONS}
    return {**sections, "world_size": config.world_size,
            "sources": {path: [source.kind, source.name] for path, source in config.sources.items()}}


def from_dict(saved: Mapping[str, Any]) -> RunConfig:
    """The config that `to_dict` of this or an older version wrote.

    Fields that did not exist then have their defaults. Raises ConfigError for unknown fields.
    """
    saved = {RENAMED.get(name, name): values for name, values in saved.items()}
    sections = {section: cls(**_fields(section, saved.get(section, {}))) for section, cls in SECTIONS.items()}
    sources = {_renamed(path): Source(*source) for path, source in saved.get("sources", {}).items()}
    return RunConfig(**sections, world_size=saved.get("world_size", 1), sources=sources)


def _renamed(path: str) -> str:
    section, dot, name = path.partition(".")
    return RENAMED.get(section, section) + dot + name


def _fields(section: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = [option.name for option in all_options().values() if option.section == section]
    for name in saved:
        if name not in names:
            raise ConfigError(f"the saved configuration has {section}.{name}, which does not exist in this "
                              f"version{did_you_mean(name, names) or '.'} It was written by another version.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
