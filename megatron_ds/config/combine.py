"""Settings of all sources → one `RunConfig`.

    dataclass defaults  <  the script's  <  files (YAML and DeepSpeed JSON, equal among themselves)  <  flags

Two files that give one option different values are an error, because neither takes precedence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ramps import parse_batch_steps
from .problems import reject
from .reading import PartOf, Setting
from .resolve import resolved
from .run import RunConfig, Source, all_options


def merge(files: Sequence[Setting], flags: Sequence[Setting], world_size: int = 1,
          scripted: Sequence[Setting] = ()) -> RunConfig:
    """Raises ConfigError where files contradict each other. Checks nothing else: see `rules`."""
    reject(contradictions(files, flags))
    return combined(files, flags, world_size, scripted)


def contradictions(files: Iterable[Setting], flags: Iterable[Setting]) -> list[str]:
    """Options to which files give different values, unless a flag decides."""
    decided = {setting.path for setting in flags}
    first: dict[str, Setting] = {}
    wrong = []
    for setting in files:
        before = first.setdefault(setting.path, setting)
        if before.value != setting.value and setting.path not in decided:
            option = all_options()[setting.path]
            wrong.append(f"{option.flag} is {before.value} in {before.source} but {setting.value} in {setting.source}: "
                         f"files do not override each other. Remove one of them, or decide with {option.flag}.")
    return wrong


def combined(files: Sequence[Setting], flags: Sequence[Setting], world_size: int = 1,
             scripted: Sequence[Setting] = ()) -> RunConfig:
    """The same without that check: the first of two files wins."""
    chosen = {setting.path: setting for setting in (*scripted, *reversed(files), *flags)}
    config = RunConfig(world_size=world_size)
    for setting in sorted(chosen.values(), key=lambda s: isinstance(s.value, PartOf)):
        config = _with(config, setting)
    if config.plan.is_dry and config.plan.world_size:
        config = replace(config, world_size=config.plan.world_size)
    return with_batch_sizes(resolved(config))


def with_batch_sizes(config: RunConfig) -> RunConfig:
    """Fill in what is missing of: global batch = micro-batch × accumulation steps × data-parallel size.

    The micro-batch is derived only if a DeepSpeed JSON gave one of the others, as DeepSpeed does. With Megatron's flags it is
    required: a forgotten flag should not mean the largest micro-batch. Does nothing where the numbers do not divide; `rules`
    reports that.
    """
    train, ranks = config.train, config.data_parallel_size
    micro, total, steps = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    if not ranks:
        return config
    kinds = {source.kind for path, source in config.sources.items() if path.startswith("train.")}
    if micro is None and total and total % (ranks * (steps or 1)) == 0 and (steps or "deepspeed" in kinds):
        micro = total // (ranks * (steps or 1))
        config = config.with_values({"train.micro_batch_size": micro}, Source(
            "derived", f"global batch {total} / ({f'{steps} steps × ' if steps else ''}{ranks} data-parallel ranks)"))
    if total is None and (last := _last_of_schedule(config)):
        total = last
        config = config.with_values({"train.global_batch_size": total}, Source(
            "derived", "the last of --step-batch-size-schedule"))
    if total is None and micro is not None:
        total = micro * ranks * (steps or 1)
        config = config.with_values({"train.global_batch_size": total}, Source(
            "derived", f"micro-batch {micro} × {f'{steps} steps × ' if steps else ''}{ranks} data-parallel ranks"))
    if steps is not None and micro is not None and total == micro * steps * ranks:
        config = replace(config, train=replace(config.train, gradient_accumulation_steps=None))
    return config


def _last_of_schedule(config: RunConfig) -> int | None:
    train, seq_length = config.train, config.model.seq_length
    if not train.step_batch_size_schedule or not seq_length:
        return None
    try:
        return parse_batch_steps(train.step_batch_size_schedule, seq_length)[-1][1]
    except ValueError:
        return None


def _with(config: RunConfig, setting: Setting) -> RunConfig:
    value = setting.value
    if isinstance(value, PartOf):
        whole = config.get(value.path)
        value = None if whole is None else whole * value.part
        if value is None:                                             # the missing whole is reported by `rules`
            return config
    return config.with_values({setting.path: value}, setting.source)
