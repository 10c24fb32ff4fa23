"""DeepSpeed's learning-rate schedulers as classes over a torch optimizer: `deepspeed.runtime.lr_schedules`.

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scheduler = WarmupLR(optimizer, warmup_max_lr=1e-3, warmup_num_steps=100)
    engine, *_ = megatron_ds.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler)

The same ramps as those of the JSON's "scheduler" (ramps.py, cycles.py). Numbers may be lists, one for each
parameter group.
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import ConfigError
from ...progress.cycles import Cycle, CycledBeta, CycleRate, RangeTest
from ...progress.ramps import DeepSpeedRate
from ..engine.group_schedule import GroupSchedule

VALID_LR_SCHEDULES = [
    "LRRangeTest",
    "OneCycle",
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
]
Number = float | Sequence[float]


class _Kind(type):
    """The class of the schedulers: the JSON's scheduler of their name is an instance of them, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_of_json = getattr(instance, "kind", None) == cls.__name__
        return is_of_json or super().__instancecheck__(instance)


class _Warmup(GroupSchedule, metaclass=_Kind):
    """A schedule that begins with a warm-up.

    min_lrs, max_lrs  the first and the highest rate of each group
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: list[DeepSpeedRate],
        last_batch_iteration: int,
    ):
        self.warmup_num_steps = rates[0].steps
        self.warmup_type = rates[0].warmup_style
        self.min_lrs = [rate.initial for rate in rates]
        self.max_lrs = [rate.highest for rate in rates]
        super().__init__(optimizer, rates, last_batch_iteration)


class WarmupLR(_Warmup):
    """The rate rises to its highest value and stays. warmup_max_lr: None is each group's own rate."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Number = 0.0,
        warmup_max_lr: Number | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        rates = _warmups(
            "WarmupLR",
            optimizer,
            (warmup_min_lr, warmup_max_lr),
            warmup_num_steps,
            1,
            warmup_type,
        )
        super().__init__(optimizer, rates, last_batch_iteration)


class WarmupDecayLR(_Warmup):
    """The rate rises, and then falls in a line until `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Number = 0.0,
        warmup_max_lr: Number | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        rates = _warmups(
            "WarmupDecayLR",
            optimizer,
            (warmup_min_lr, warmup_max_lr),
            warmup_num_steps,
            total_num_steps,
            warmup_type,
        )
        super().__init__(optimizer, rates, last_batch_iteration)


class WarmupCosineLR(_Warmup):
    """Each group's own rate, multiplied by a ratio that rises and then falls along a cosine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        _check_warmup(warmup_num_steps, warmup_type)
        self._ratio = DeepSpeedRate(
            "WarmupCosineLR",
            1.0,
            1,
            lowest=cos_min_ratio,
            initial=warmup_min_ratio,
            warmup=warmup_num_steps,
            total=total_num_steps,
            warmup_style=warmup_type,
        )
        rates = [
            replace(
                self._ratio,
                highest=group["lr"],
                lowest=group["lr"] * cos_min_ratio,
                initial=group["lr"] * warmup_min_ratio,
            )
            for group in optimizer.param_groups
        ]
        super().__init__(optimizer, rates, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the factor of each group's own rate in the next update."""
        return self._ratio.at(self.last_batch_iteration)


class LRRangeTest(GroupSchedule, metaclass=_Kind):
    """The rate grows from step to step, to find the one at which training diverges."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Number = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        _check_steps("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.min_lr = _of_groups(optimizer, lr_range_test_min_lr)
        rates = [
            RangeTest(
                1,
                lr,
                lr_range_test_step_size,
                lr_range_test_step_rate,
                lr_range_test_staircase,
            )
            for lr in self.min_lr
        ]
        super().__init__(optimizer, rates, last_batch_iteration)


class OneCycle(GroupSchedule, metaclass=_Kind):
    """The rate rises and falls once, and then decays; Adam's beta1 goes the opposite way."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Number,
        cycle_max_lr: Number,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Number = 0.8,
        cycle_max_mom: Number = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        # The second half is like the first where it has no numbers of its own.
        second = (
            cycle_first_step_size
            if cycle_second_step_size is None
            else cycle_second_step_size
        )
        stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        _check_steps("cycle_first_step_size", cycle_first_step_size, 1)
        _check_steps("cycle_second_step_size", second, 0)
        cycle = Cycle(
            1,
            cycle_first_step_size,
            second,
            cycle_first_stair_count,
            stairs,
            decay_step_size,
        )
        # The same cycle for all groups, each between ends of its own.
        self.min_lrs = _of_groups(optimizer, cycle_min_lr)
        self.max_lrs = _of_groups(optimizer, cycle_max_lr)
        rates = [
            CycleRate(cycle, highest, lowest, decay_lr_rate)
            for highest, lowest in zip(self.max_lrs, self.min_lrs)
        ]
        momenta = zip(
            _of_groups(optimizer, cycle_max_mom), _of_groups(optimizer, cycle_min_mom)
        )
        betas = [
            CycledBeta(cycle, highest, lowest, decay_mom_rate)
            for highest, lowest in momenta
        ]
        super().__init__(
            optimizer, rates, last_batch_iteration, betas if cycle_momentum else None
        )


def _warmups(
    style: str,
    optimizer: torch.optim.Optimizer,
    ends: tuple[Number, Number | None],
    warmup: int,
    total: int,
    warmup_style: str,
) -> list[DeepSpeedRate]:
    """Return a rate for each group. ends: the lowest and the highest; None: each group's own."""
    _check_warmup(warmup, warmup_style)
    lowest = _of_groups(optimizer, ends[0])
    own = [group["lr"] for group in optimizer.param_groups]
    highest = _of_groups(optimizer, own if ends[1] is None else ends[1])
    return [
        DeepSpeedRate(
            style,
            high,
            1,
            initial=low,
            warmup=warmup,
            total=total,
            warmup_style=warmup_style,
        )
        for low, high in zip(lowest, highest)
    ]


def _check_steps(name: str, steps: int, least: int) -> None:
    """Raises ConfigError for a number of steps below the least."""
    if steps < least:
        raise ConfigError(
            f"{name}={steps}: the schedule divides by it. Use {least} or more."
        )


def _check_warmup(steps: int, style: str) -> None:
    if not isinstance(steps, int) or steps <= 0:
        raise ConfigError(
            f"warmup_num_steps={steps}: a warm-up has a whole number of steps. Use 1 or more."
        )
    if style not in ("log", "linear"):
        raise ConfigError(
            f"warmup_type={style!r}: a warm-up is log or linear. Use one of them."
        )


def _of_groups(optimizer: torch.optim.Optimizer, value: Number) -> list[float]:
    """Return the value of each group, from one for all, or from a list."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ConfigError(
            f"{len(values)} values for {count} parameter groups of the optimizer. Give one for "
            "each group, or one number for all."
        )
    return values


# ---------------------------------------------------------------------- command line
TUNING = {
    "--lr_schedule": str,
    "--lr_range_test_min_lr": float,
    "--lr_range_test_step_rate": float,
    "--lr_range_test_step_size": int,
    "--lr_range_test_staircase": bool,
    "--cycle_min_lr": float,
    "--cycle_max_lr": float,
    "--cycle_first_step_size": int,
    "--cycle_first_stair_count": int,
    "--cycle_second_step_size": int,
    "--cycle_second_stair_count": int,
    "--decay_step_size": int,
    "--decay_lr_rate": float,
    "--cycle_min_mom": float,
    "--cycle_max_mom": float,
    "--decay_mom_rate": float,
    "--warmup_min_lr": float,
    "--warmup_max_lr": float,
    "--warmup_num_steps": int,
    "--warmup_type": str,
    "--cos_min_ratio": float,
    "--warmup_min_ratio": float,
}


def add_tuning_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the arguments of the schedulers to a parser; `get_config_from_args` reads them."""
    group = parser.add_argument_group(
        "Convergence Tuning", "schedulers of the learning rate"
    )
    for flag, kind in TUNING.items():
        group.add_argument(flag, type=kind, default=None)
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(the JSON's "scheduler" from those arguments, None), or (None, what is missing)."""
    name = getattr(args, "lr_schedule", None)
    if name not in VALID_LR_SCHEDULES:
        return None, f"--lr_schedule {name}: use one of {', '.join(VALID_LR_SCHEDULES)}"
    given = {
        flag[2:]: getattr(args, flag[2:], None)
        for flag in TUNING
        if flag != "--lr_schedule"
    }
    return {
        "type": name,
        "params": {key: value for key, value in given.items() if value is not None},
    }, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """(the learning rate of the JSON's "scheduler", ""), or (None, what is missing)."""
    names = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    name = names.get(config.get("type", ""), "warmup_max_lr")
    lr = config.get("params", {}).get(name)
    return lr, "" if lr is not None else f'"params" has no "{name}"'
