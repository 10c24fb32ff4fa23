"""Difficulty: an integer that grows during training, as a pure function of the step; DeepSpeed's values
without its state.

It is a sequence length, the largest value or percentile of a metric that samples may have, or the number of
tokens that a layer keeps. Steps count from 1: the first step of a run uses `at(1)`, which is `Progress.step +
1`.

    Rise      from `minimum` to `maximum` along the p-th root of the time (p = 1: a line), in multiples of k
    Stairs    a list of values, each until a given step
    Custom    the values of a function of the user

Letters: t step, T steps of the rise, p degree of the root, k multiple. Rise with p = 1 is the pacing function
of Li et al. 2022 (arXiv:2108.06084), section 4.1, equation 1. Random-LTD is Yao et al. 2022
(arXiv:2211.11586), section 3: chosen blocks process a random subset of the tokens, which grows to all tokens.
"""

import importlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import ConfigError
from ...progress.kept_tokens import Difficulty
from ...registry import did_you_mean


@dataclass(frozen=True)
class Rise:
    """floor((t/T)^(1/p) (max − min) + min), rounded down to a multiple of k, between `lowest` and `maximum`.

    lowest: None for the first multiple of k that is not below `minimum`. 0 for the values of DeepSpeed before
    0.19, which rounds down below the minimum, for instance to a sequence length of 0. The maximum need not be
    a multiple of k: it is reached at some t > T.
    """

    minimum: int
    maximum: int
    steps: int
    multiple: int = 1
    root: float = 1
    lowest: int | None = None

    def at(self, step: int) -> int:
        """Return the difficulty of a step, counted from 1."""
        if self.minimum == self.maximum:
            return self.maximum  # as in DeepSpeed, also if it is not a multiple
        # Floats, as in DeepSpeed, so that the integers are equal.
        risen = (step / self.steps) ** (1.0 / self.root)
        value = math.floor(risen * (self.maximum - self.minimum) + self.minimum)
        value -= value % self.multiple
        return min(max(value, self.floor), self.maximum)

    @property
    def floor(self) -> int:
        """The smallest difficulty."""
        return (
            -(-self.minimum // self.multiple) * self.multiple
            if self.lowest is None
            else self.lowest
        )


@dataclass(frozen=True)
class Stairs:
    """values[i] until step until[i]; the last value has no end. The first value ≥ `maximum` stays."""

    values: tuple[int, ...]
    until: tuple[int, ...]
    maximum: int

    def at(self, step: int) -> int:
        """Return the difficulty of a step, counted from 1."""
        return self.values[min(bisect_left(self.until, step), self._top)]

    @cached_property
    def _top(self) -> int:
        return next(
            (i for i, value in enumerate(self.values) if value >= self.maximum),
            len(self.values) - 1,
        )


@dataclass(frozen=True)
class Custom:
    """function(step), an integer in [1, maximum]. If it depends on anything else, a resumed run differs.

    DeepSpeed stops calling the function when it has returned the maximum; here it is called at every step.
    """

    function: Callable[[int], int]
    maximum: int
    name: str = "the schedule function"

    def at(self, step: int) -> int:
        """Return the difficulty of a step, from 1. Raises ConfigError for an invalid value of the function."""
        value = self.function(step)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 1 <= value <= self.maximum
        ):
            raise ConfigError(
                f"{self.name} returned {value!r} for step {step}: a difficulty is an integer "
                f"from 1 to the max_difficulty, {self.maximum}."
            )
        return value


def make_difficulty(
    settings: Mapping[str, Any], where: str = "the curriculum"
) -> Difficulty:
    """Return the difficulty that a block of DeepSpeed's JSON describes. Raises ConfigError.

    settings: min_difficulty, max_difficulty, schedule_type, schedule_config; other keys are ignored
    where: begins messages
    """
    low, high = (
        _integer(settings, key, where) for key in ("min_difficulty", "max_difficulty")
    )
    if low > high:
        raise ConfigError(
            f"{where}: min_difficulty {low} is above max_difficulty {high}, but difficulty "
            "only rises. Exchange the two."
        )
    kind = settings.get("schedule_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"{where}: schedule_type is {kind!r}{did_you_mean(str(kind), list(KINDS)) or '.'} "
            f"Known: {', '.join(KINDS)}."
        )
    make, needed, optional = KINDS[kind]
    config = settings.get("schedule_config", {})
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where}: schedule_config is {config!r}, not a block; {kind} needs "
            f"{', '.join(needed)} in it."
        )
    missing = [key for key in needed if key not in config]
    unknown = sorted(config.keys() - {*needed, *optional})
    if missing or unknown:
        wrong = [
            f"{what}: {', '.join(keys)}"
            for what, keys in (("missing", missing), ("unknown", unknown))
            if keys
        ]
        raise ConfigError(
            f"{where}: the schedule_config of {kind} has the keys {', '.join(needed)}; "
            f"{' and '.join(wrong)}."
        )
    made = make(low, high, config, where)
    # DeepSpeed does not use a schedule that cannot rise
    return Stairs((high,), (), high) if low == high else made


def _rise(low: int, high: int, config: Mapping[str, Any], where: str) -> Rise:
    root = config.get("root_degree", 1)
    if (
        isinstance(root, bool)
        or not isinstance(root, int | float)
        or not 0 < root < math.inf
    ):
        raise ConfigError(
            f"{where}: root_degree is {root!r}; it must be a number above 0: 1 is a line, 2 "
            "the square root."
        )
    steps, multiple = (
        _integer(config, key, where, 1)
        for key in ("total_curriculum_step", "difficulty_step")
    )
    return Rise(low, high, steps, multiple, root)


def _stairs(low: int, high: int, config: Mapping[str, Any], where: str) -> Stairs:
    values, until = (
        _integers(config, key, where) for key in ("difficulty", "max_step")
    )
    if len(values) != len(until) + 1 or not until:
        raise ConfigError(
            f"{where}: difficulty has {len(values)} values and max_step {len(until)}. The last "
            "difficulty has no last step, so max_step must be shorter by one, and must not be "
            "empty."
        )
    if list(until) != sorted(set(until)) or until[0] < 1:
        raise ConfigError(
            f"{where}: max_step is {list(until)}; the steps must rise and begin at 1 or "
            "later. Otherwise a difficulty would be skipped."
        )
    if max(values) > high:
        raise ConfigError(
            f"{where}: difficulty contains {max(values)}, above max_difficulty {high}. "
            "Raise max_difficulty."
        )
    return Stairs(values, until, high)


def _custom(low: int, high: int, config: Mapping[str, Any], where: str) -> Custom:
    name = config["function"]
    return Custom(import_function(name, f"{where}: function"), high, f"{where}: {name}")


# schedule_type → (maker, required keys of schedule_config, optional keys)
KINDS: Mapping[
    str, tuple[Callable[..., Difficulty], tuple[str, ...], tuple[str, ...]]
] = {
    "fixed_linear": (_rise, ("total_curriculum_step", "difficulty_step"), ()),
    "fixed_root": (
        _rise,
        ("total_curriculum_step", "difficulty_step", "root_degree"),
        (),
    ),
    "fixed_discrete": (_stairs, ("difficulty", "max_step"), ()),
    "custom": (_custom, ("function",), ()),
}


def import_function(name: Any, where: str) -> Callable:
    """Return the function at an import path "package.module:function". Raises ConfigError."""
    module, colon, attribute = str(name).partition(":")
    if not (module and colon and attribute):
        raise ConfigError(
            f"{where} is {name!r}; give an import path such as "
            "my_package.my_module:my_function."
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where} {name!r} cannot be imported: {error}. Add its folder to "
            "PYTHONPATH."
        ) from error
    if not callable(function):
        raise ConfigError(f"{where} {name!r} is {function!r}, not a function.")
    return function


def _integer(
    settings: Mapping[str, Any], key: str, where: str, at_least: int | None = None
) -> int:
    value = settings.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or at_least is not None
        and value < at_least
    ):
        bound = "" if at_least is None else f" of at least {at_least}"
        state = "is missing" if key not in settings else f"is {value!r}"
        raise ConfigError(f"{where}: {key} {state}; give an integer{bound}.")
    return value


def _integers(settings: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    values = settings[key]
    if not isinstance(values, list | tuple) or any(
        isinstance(v, bool) or not isinstance(v, int) for v in values
    ):
        raise ConfigError(f"{where}: {key} is {values!r}; give a list of integers.")
    return tuple(values)
