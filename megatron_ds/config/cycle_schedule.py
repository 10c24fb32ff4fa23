"""Learning rates and beta1 of OneCycle and LRRangeTest, as the options set them."""

from ..progress.cycles import Cycle, CycledBeta, CycleRate, RangeTest
from ..progress.ramps import Ramp
from .options.cycle import ONE_CYCLE
from .run import RunConfig


def cycled_rate(config: RunConfig, highest: float, lowest: float) -> Ramp[float]:
    """Return the learning rate of a style with cycles, over samples."""
    cycle = config.cycle
    if config.optimizer.lr_decay_style == ONE_CYCLE:
        return CycleRate(_cycle(config), highest, lowest, cycle.decay_lr_rate)
    return RangeTest(
        config.train.global_batch_size,
        highest,
        cycle.lr_range_test_step_size,
        cycle.lr_range_test_step_rate,
        cycle.lr_range_test_staircase,
    )


def cycled_beta(config: RunConfig) -> CycledBeta:
    """Return Adam's beta1, which falls where the learning rate rises."""
    cycle = config.cycle
    return CycledBeta(
        _cycle(config), cycle.cycle_max_mom, cycle.cycle_min_mom, cycle.decay_mom_rate
    )


def _cycle(config: RunConfig) -> Cycle:
    cycle = config.cycle
    first = cycle.cycle_first_step_size
    second = cycle.cycle_second_step_size
    stairs = cycle.cycle_first_stair_count
    falling = cycle.cycle_second_stair_count
    return Cycle(
        config.train.global_batch_size,
        first,
        first if second is None else second,
        stairs,
        stairs if falling is None else falling,
        cycle.decay_step_size,
    )
