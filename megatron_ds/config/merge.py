"""Settings of all sources → one `RunConfig`.

    dataclass defaults  <  files (YAML and DeepSpeed JSON, equal among themselves)  <  flags

Two files that give one option different values are an error, since neither is the stronger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..errors import ConfigError
from .flags import Setting
from .run import RunConfig, Source, all_options


def merge(files: Sequence[Setting], flags: Sequence[Setting], world_size: int) -> RunConfig:
    """Raises ConfigError where files contradict each other. Checks nothing else: see `rules`."""
    config = RunConfig(world_size=world_size)
    for setting in (*_without_contradictions(files), *flags):
        config = config.with_values({setting.path: setting.value}, setting.source)
    return with_batch_sizes(config)


def with_batch_sizes(config: RunConfig) -> RunConfig:
    """Fill in what is missing of: global batch = micro-batch × accumulation steps × data-parallel size.

    Does nothing where the numbers do not work out; `rules` reports that.
    """
    train, ranks = config.train, config.data_parallel_size
    micro, total, steps = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    derived = {}
    if micro is None and total is not None and ranks:
        if total % (ranks * (steps or 1)) == 0:
            micro = derived["train.micro_batch_size"] = total // (ranks * (steps or 1))
    if total is None and micro is not None and ranks:
        total = derived["train.global_batch_size"] = micro * ranks * (steps or 1)
    config = config.with_values(derived, Source("derived", "derived from the other batch sizes")) if derived else config
    if steps is not None and micro is not None and total == micro * steps * ranks:
        config = replace(config, train=replace(config.train, gradient_accumulation_steps=None))
    return config


def _without_contradictions(settings: Iterable[Setting]) -> list[Setting]:
    first: dict[str, Setting] = {}
    wrong = []
    for setting in settings:
        before = first.setdefault(setting.path, setting)
        if before.value != setting.value:
            option = all_options()[setting.path]
            wrong.append(f"{option.name} is {before.value!r} in {before.source} but {setting.value!r} in {setting.source}: "
                         f"neither file is the stronger. Remove one of them, or decide with {option.flag}.")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return list(first.values())
