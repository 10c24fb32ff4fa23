"""The rule about options that have an effect only together with another one (`option(needs=…)`)."""

from collections.abc import Iterator

from ..messages import all_of, either, flag, needed
from ..options.need import Need, holds
from ..run import RunConfig, all_options


def needs(config: RunConfig) -> Iterator[str]:
    """One problem for all given options that lack the same other option."""
    lacking: dict[Need, list[str]] = {}
    for path, option in all_options().items():
        wanted = option.needs
        if wanted is None or config.is_default(path):
            continue
        if not _is_met(config, wanted):
            lacking.setdefault(wanted, [])
            lacking[wanted].append(path)

    for wanted, paths in lacking.items():
        yield _without(wanted, paths)


def _is_met(config: RunConfig, wanted: Need) -> bool:
    """Whether one of the other options has a value that suffices."""
    for path, values in wanted.choices:
        value = config.get(path)
        if holds(value, values):
            return True
    return False


def _without(wanted: Need, paths: list[str]) -> str:
    """The problem of the options at `paths`, which lack what they need."""
    flags = needed(wanted)
    addition = flags[0] if len(flags) == 1 else "one of them"
    names = all_of([f"[{path}]" for path in paths])
    if len(paths) == 1:
        removal = flag(paths[0])
        verb = "has"
    else:
        removal = "these options"
        verb = "have"
    return (
        f"{names} {verb} no effect without {either(flags)}. "
        f"Add {addition}, or remove {removal}."
    )


NEED_RULES = (needs,)
