"""Rules about OneCycle and LRRangeTest."""

from collections.abc import Iterator

from ..messages import given
from ..options.cycle import ONE_CYCLE, RANGE_TEST
from ..run import RunConfig
from ..training_schedule import make_beta1

# Options of other styles. `lr_warmup_style` has its own rule.
SPANS = (
    "optimizer.lr_decay_iters",
    "optimizer.lr_decay_samples",
    "optimizer.lr_warmup_iters",
    "optimizer.lr_warmup_samples",
    "optimizer.lr_warmup_fraction",
    "optimizer.lr_warmup_init",
    "optimizer.lr_wsd_decay_iters",
    "optimizer.lr_wsd_decay_samples",
)


def cycles(config: RunConfig) -> Iterator[str]:
    """A style replaces the options of others, and beta1 stays below 1."""
    style = config.optimizer.lr_decay_style
    # Spans of training, which both styles replace by their own.
    if style in (ONE_CYCLE, RANGE_TEST):
        asked = [
            path
            for path in SPANS
            if path in config.sources and config.sources[path].kind != "script"
        ]
        yield from given(
            config,
            asked,
            f"has no effect with [lr_decay_style], whose steps are those of its "
            f"own options ({_sizes(style)}). Remove it.",
        )
    # Options of one of the styles.
    if style == RANGE_TEST:
        yield from given(
            config,
            ["optimizer.min_lr"],
            "has no effect with [lr_decay_style], which begins with --lr. Remove it.",
        )
    if style == ONE_CYCLE:
        yield from _momentum(config)


def _sizes(style: str) -> str:
    return (
        "--cycle-first-step-size, --cycle-second-step-size"
        if style == ONE_CYCLE
        else "--lr-range-test-step-size"
    )


def _momentum(config: RunConfig) -> Iterator[str]:
    """beta1 has a range, and its decay, which makes it grow, ends below 1."""
    cycle = config.cycle
    steps = config.train.train_iters
    if cycle.cycle_min_mom > cycle.cycle_max_mom:
        yield "[cycle_min_mom] is above [cycle_max_mom]. Lower it."
    if not steps or not config.train.global_batch_size:
        return
    beta1 = make_beta1(config)
    if beta1 is not None:
        beta1.at(steps - 2)  # of the last step; raises where it is too large
