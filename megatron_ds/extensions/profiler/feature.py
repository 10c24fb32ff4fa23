"""Measurements of a run: the declaration of the feature."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...features import NO_TAGS, Feature, Later, rules_if
from .options import TO_TENSORBOARD, MeasuredLogOptions, ProfilerConfig

own = partial(Later, __package__)
CHECK_OUTPUTS = own(".output_check:check_outputs")
A_FEW_STEPS = "a few steps are profiled with --profile --use-pytorch-profiler"
Wish = Callable[[Any], Any]


def _switched_on(observer: Later, is_wanted: Wish) -> Wish:
    """Return the maker of an observer: its module is imported if a configuration asks for it."""
    return lambda config: observer() if is_wanted(config) else None


def _of(option: str) -> Wish:
    """Return the function that reads an option of the section `profiler`."""
    return lambda config: getattr(config.of(ProfilerConfig), option)


def _times_phases(config: Any) -> bool:
    """Return whether --timing-log-level alone measures phases; the FLOPs profile does it, too."""
    return config.logging.timing_log_level and not _of("flops_profiler")(config)


def _logs_numbers(config: Any) -> bool:
    """Return whether a log line has numbers of the weights, the optimizer's state or the memory."""
    wanted = config.logging
    return wanted.log_params_norm or any(config.get(path) for path in TO_TENSORBOARD)


def check_outputs(config: Any, mesh: Any) -> None:
    """Raises ConfigError where --profile cannot be had on the device, or nothing can be written in --trace."""
    if _of("profile")(config) or config.logging.trace:
        CHECK_OUTPUTS(config, mesh)


# In the order in which they are called.
OBSERVERS = {
    own(".phase_times:TimedPhases"): _times_phases,
    own(".flops_profile:ProfiledFlops"): _of("flops_profiler"),
    own(".tuning:MeasuredSteps"): _of("autotuning"),
    own(".memory_history:MemoryOfSteps"): _of("record_memory_history"),
    own(".kernel_profile:ProfiledKernels"): _of("profile"),
    own(".stragglers:SlowRanks"): lambda config: config.logging.straggler_report,
    own(".noise_scale:GradientNoise"): _of("grad_noise_scale"),
    own(".communication_table:CommunicationTable"): _of("comms_logger"),
    own(".state_statistics:StateNumbers"): _logs_numbers,
    own(".trace:TracedSteps"): lambda config: config.logging.trace,
}

FEATURES = [
    Feature(
        "profiler",
        title="Measurements",
        options=ProfilerConfig,
        extends={"logging": MeasuredLogOptions},
        rules=(
            *rules_if(lambda config: config.logging.trace_steps, own(".rules:traces")),
            *rules_if(_of("grad_noise_scale"), own(".rules:noise")),
            *rules_if(_of("autotuning"), own(".rules:measured_steps")),
        ),
        outputs=check_outputs,
        useless=((TO_TENSORBOARD, NO_TAGS),),
        synonyms=dict.fromkeys(("profiler", "torch-profiler"), A_FEW_STEPS),
        provides={"communication log": own(".comms_log")},
        observers=[_switched_on(*row) for row in OBSERVERS.items()],
    )
]
