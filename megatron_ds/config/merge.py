"""Settings of all sources → one `RunConfig`.

    dataclass defaults  <  the script's  <  files (YAML and DeepSpeed JSON, equal among themselves)  <  flags

Two files that give one option different values are an error, since neither is the stronger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ramps import parse_batch_steps
from .problems import reject
from .run import RunConfig, Source, all_options
from .setting import PartOf, Setting


def merge(files: Sequence[Setting], flags: Sequence[Setting], world_size: int = 1,
          scripted: Sequence[Setting] = ()) -> RunConfig:
    """Raises ConfigError where files contradict each other. Checks nothing else: see `rules`."""
    chosen = {setting.path: setting for setting in (*scripted, *_without_contradictions(files, flags), *flags)}
    config = RunConfig(world_size=world_size)
    for setting in sorted(chosen.values(), key=lambda s: isinstance(s.value, PartOf)):
        config = _with(config, setting)
    if config.plan.is_dry and config.plan.world_size:
        config = replace(config, world_size=config.plan.world_size)
    return with_batch_sizes(_resolved(config))


def with_batch_sizes(config: RunConfig) -> RunConfig:
    """Fill in what is missing of: global batch = micro-batch × accumulation steps × data-parallel size.

    The micro-batch is derived only where somebody spoke DeepSpeed: in Megatron's words it is required, and the largest that
    fits is not what a forgotten flag should mean. Does nothing where the numbers do not work out; `rules` reports that.
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


def _resolved(config: RunConfig) -> RunConfig:
    """Values that follow from others."""
    train, data = config.train, config.data
    if data.mock_data and data.tokenizer_type is None:
        config = config.with_values({"data.tokenizer_type": "NullTokenizer"}, Source("derived", "for --mock-data"))
    if train.recompute_method == "uniform" and train.recompute_num_layers == 1:       # layers one by one, and all of them
        config = replace(config, train=replace(train, recompute_num_layers=None))
    return config


def _without_contradictions(files: Iterable[Setting], flags: Iterable[Setting]) -> list[Setting]:
    """The files' settings that no flag decides."""
    decided = {setting.path for setting in flags}
    first: dict[str, Setting] = {}
    wrong = []
    for setting in files:
        before = first.setdefault(setting.path, setting)
        if before.value != setting.value and setting.path not in decided:
            option = all_options()[setting.path]
            wrong.append(f"{option.flag} is {before.value} in {before.source} but {setting.value} in {setting.source}: "
                         f"neither is the stronger. Remove one of them, or decide with {option.flag}.")
    reject(wrong)
    return list(first.values())
