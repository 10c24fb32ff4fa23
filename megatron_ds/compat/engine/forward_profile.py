"""`ForwardProfile`: "flops_profiler" of an engine's JSON, a report of one forward of its module."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ...config.options.option import shown
from ...errors import ConfigError
from .module_profiler import ModuleProfiler

BLOCK = "flops_profiler"


@dataclass(frozen=True)
class ProfileWish:
    """The block.

    profile_step           the number of updates before the step that is profiled
    module_depth           of the list of the costliest modules; -1 for the innermost
    top_modules            how many of each depth are listed
    detailed               whether the report has a line for each module
    output_file            None for the standard output
    recompute_fwd_factor   part of the forward that the backward computes again
    """

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = 0.0


# Types of JSON values for the annotations above.
TYPES: Mapping[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str | None: (str, type(None)),
}


def profile_wish(name: str, block: Mapping[str, Any]) -> ProfileWish:
    """Return the wish in a JSON. Raises ConfigError for an unknown key, and for a value of another type."""
    given = block.get(BLOCK, {})
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{name}: "{BLOCK}" is {shown(given)}: it is a block {{ … }}.'
        )
    types = {field.name: TYPES[field.type] for field in fields(ProfileWish)}
    for key, value in given.items():
        if key not in types:
            raise ConfigError(
                f'{name}: unknown key "{BLOCK}.{key}". The block has {", ".join(types)}.'
            )
        is_number = isinstance(value, bool) and bool not in types[key]
        if is_number or not isinstance(value, types[key]):
            raise ConfigError(
                f'{name}: "{BLOCK}.{key}" is {shown(value)}, of the wrong type.'
            )
    return ProfileWish(**given)


class ForwardProfile:
    """Profiles the first forward behind `profile_step` updates, on rank 0, and prints it once."""

    def __init__(self, wish: ProfileWish, module: nn.Module, rank: int):
        self._wish = wish
        self._module = module
        self._is_left = wish.enabled and rank == 0

    @contextmanager
    def around_forward(self, updates: int) -> Iterator[None]:
        """Around a forward of the module. updates: before it."""
        if not self._is_left or updates != self._wish.profile_step:
            yield
            return
        self._is_left = False
        profiler = ModuleProfiler(
            self._module, recompute_fwd_factor=self._wish.recompute_fwd_factor
        )
        profiler.start_profile()
        try:
            yield
        finally:
            profiler.stop_profile()
        profiler.print_model_profile(
            updates,
            self._wish.module_depth,
            self._wish.top_modules,
            self._wish.detailed,
            self._wish.output_file,
        )
        profiler.end_profile()
