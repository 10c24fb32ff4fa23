"""Options of OneCycle and LRRangeTest, under the names of DeepSpeed's flags and keys."""

from dataclasses import dataclass

from .need import need
from .option import option

ONE_CYCLE = "OneCycle"
RANGE_TEST = "LRRangeTest"


def _of_scheduler(default=None, *, name: str, **more):
    """Declare an option of one style, whose JSON key is a parameter of the scheduler."""
    style = RANGE_TEST if "range_test" in name else ONE_CYCLE
    more.setdefault("needs", need("optimizer.lr_decay_style", style))
    return option(default, json=f"scheduler.params.{name}", **more)


@dataclass(frozen=True)
class CycleConfig:
    """`--lr-decay-style` OneCycle goes from --min-lr to --lr and back, LRRangeTest begins with --lr. Skipped
    steps do not count.
    """

    cycle_first_step_size: int = _of_scheduler(
        2000,
        name="cycle_first_step_size",
        at_least=1,
        unit="iterations",
        help="Steps in which the learning rate rises (OneCycle).",
    )
    cycle_second_step_size: int | None = _of_scheduler(
        None,
        name="cycle_second_step_size",
        at_least=0,
        unit="iterations",
        help="Steps in which it falls (OneCycle). Default: as many as it rises.",
    )
    cycle_first_stair_count: int = _of_scheduler(
        0,
        name="cycle_first_stair_count",
        at_least=0,
        help="Rise in this many stairs; 0: in a line (OneCycle).",
    )
    cycle_second_stair_count: int | None = _of_scheduler(
        None,
        name="cycle_second_stair_count",
        at_least=0,
        help="Fall in this many stairs (OneCycle). Default: as many as it rises in.",
    )
    decay_step_size: int = _of_scheduler(
        0,
        name="decay_step_size",
        at_least=0,
        unit="iterations",
        help="Unit of --decay-lr-rate and --decay-mom-rate; 0: no decay after the cycle (OneCycle).",
    )
    decay_lr_rate: float = _of_scheduler(
        0.0,
        name="decay_lr_rate",
        at_least=0,
        needs=need("cycle.decay_step_size"),
        help="After the cycle the learning rate is --min-lr / (1 + this rate for each --decay-step-size) "
        "(OneCycle).",
    )
    cycle_momentum: bool = _of_scheduler(
        True,
        name="cycle_momentum",
        help="Adam's beta1 falls from --cycle-max-mom to --cycle-min-mom while the learning rate rises, and "
        "rises again (OneCycle). Optimizers without betas keep their momentum.",
    )
    cycle_min_mom: float = _of_scheduler(
        0.8, name="cycle_min_mom", at_least=0, below=1, help="Lowest beta1 (OneCycle)."
    )
    cycle_max_mom: float = _of_scheduler(
        0.9, name="cycle_max_mom", at_least=0, below=1, help="Highest beta1 (OneCycle)."
    )
    decay_mom_rate: float = _of_scheduler(
        0.0,
        name="decay_mom_rate",
        at_least=0,
        needs=need("cycle.decay_step_size"),
        help="After the cycle beta1 is --cycle-max-mom × (1 + this rate for each --decay-step-size) "
        "(OneCycle).",
        avoid="It grows, as DeepSpeed's does; it must stay below 1.",
    )
    lr_range_test_step_size: int = _of_scheduler(
        2000,
        name="lr_range_test_step_size",
        at_least=1,
        unit="iterations",
        help="Unit of --lr-range-test-step-rate (LRRangeTest).",
    )
    lr_range_test_step_rate: float = _of_scheduler(
        1.0,
        name="lr_range_test_step_rate",
        at_least=0,
        help="The learning rate is --lr × (1 + this rate for each --lr-range-test-step-size) (LRRangeTest).",
    )
    lr_range_test_staircase: bool = _of_scheduler(
        False,
        name="lr_range_test_staircase",
        help="Raise it once for each --lr-range-test-step-size, not at each step (LRRangeTest).",
    )
