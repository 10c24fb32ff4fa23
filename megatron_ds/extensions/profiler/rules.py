"""Rules about what is measured."""

from collections.abc import Iterator

from ...config.run import RunConfig
from .options import ProfilerConfig


def traces(config: RunConfig) -> Iterator[str]:
    """The steps of a trace are in order."""
    steps = config.logging.trace_steps
    if steps and steps[0] > steps[1]:
        yield "[trace_steps] ends before it begins. Give the first step, then the last."


def profiles(config: RunConfig) -> Iterator[str]:
    """An autotuner's run measures at least one step; the noise scale compares two batches."""
    wanted = config.of(ProfilerConfig)
    # The noise scale compares two batches.
    size = config.train.global_batch_size
    if (
        wanted.grad_noise_scale
        and size
        and config.data_parallel_size
        and config.num_microbatches < 2
    ):
        yield (
            "[grad_noise_scale] compares the first micro-batch with the whole step, but "
            "[global_batch_size] is one micro-batch of [micro_batch_size] on each of "
            f"{config.data_parallel_size} data-parallel ranks. Use a smaller micro-batch, or a larger "
            "global batch."
        )
    # An autotuner measures steps.
    if wanted.autotuning and wanted.autotuning_start_step > wanted.autotuning_end_step:
        yield "[autotuning_start_step] is after [autotuning_end_step]: no step is measured. Lower it."
