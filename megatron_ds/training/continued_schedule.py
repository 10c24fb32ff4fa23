"""What a resume changes of the schedules: learning rate and weight decay are functions of progress and of the options.

Spans in iterations are that many times the global batch size. So another batch size, or another length where no decay
is given, moves the whole schedule, which a user may not expect.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..config import RunConfig
from ..config.training_schedule import make_learning_rate, make_weight_decay
from ..planning.training_length import make_length
from ..progress.ramps import LearningRate, Progress, Ramp, scheduled_samples

SCHEDULES = {
    "learning rate": make_learning_rate,
    "weight decay": make_weight_decay,
}


def changes(before: RunConfig, now: RunConfig, progress: Progress) -> Iterator[str]:
    """Yield a sentence for each schedule that the options of a checkpoint continue with other values.

    before, now: the options of the checkpoint, and those of this start
    """
    last = _before_last_step(now, progress)
    for name, make in SCHEDULES.items():
        here = make(now)
        there = make(before)
        if (here(progress), here(last)) == (there(progress), there(last)):
            continue
        yield (
            f"the {name} of the next step is {here(progress):.3e}, and {there(progress):.3e} with the options of the "
            f"checkpoint; that of the last step is {here(last):.3e}, and {there(last):.3e}"
            f"{_reason(here, there, progress)}"
        )


def _before_last_step(config: RunConfig, progress: Progress) -> Progress:
    """Return the progress with which the last step of the run begins."""
    rest = make_length(config).samples_after(progress)
    size = config.train.global_batch_size
    assert size is not None, "parsing sets it"
    samples = max(0, rest - size)
    tokens = samples * config.model.seq_length
    return replace(
        progress,
        samples=progress.samples + samples,
        scheduled_samples=progress.scheduled_samples + samples,
        tokens=progress.tokens + tokens,
        layer_tokens=progress.layer_tokens + tokens * config.model.num_layers,
    )


def _reason(here: Ramp[float], there: Ramp[float], progress: Progress) -> str:
    """Return the ends of two decays in samples, if they differ, and how to keep the earlier one."""
    if not isinstance(here, LearningRate) or not isinstance(there, LearningRate):
        return ""
    in_samples = all(rate.count is scheduled_samples for rate in (here, there))
    if not in_samples or here.decay == there.decay:
        return ""
    return (
        f". It decays until {here.decay:,} samples, and until {there.decay:,} there; {progress.scheduled_samples:,} "
        f"are done. --lr-decay-samples {there.decay} keeps its end"
    )
