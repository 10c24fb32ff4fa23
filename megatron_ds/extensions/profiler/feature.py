"""Measurements of a run: the declaration of the feature."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .log_options import TO_TENSORBOARD, MeasuredLogOptions
from .options import ProfilerConfig

own = partial(Later, __package__)
OUTPUTS = own(".output_check:check_outputs")
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


def _measures(config: Any) -> bool:
    """Return whether an option about measurements is given."""
    wanted = config.of(ProfilerConfig) != ProfilerConfig()
    return wanted or bool(config.logging.trace_steps)


def _check_outputs(config: Any, mesh: Any) -> None:
    """Check that a profile can be had, and the trace be written."""
    if _of("profile")(config) or config.logging.trace:
        OUTPUTS(config, mesh)


FEATURES = [
    Feature(
        "profiler",
        title="Measurements",
        options=ProfilerConfig,
        extends={"logging": MeasuredLogOptions},
        rules=rules_if(_measures, own(".rules:traces"), own(".rules:profiles")),
        outputs=_check_outputs,
        useless=own(".useless:rows"),
        provides={"communication log": own(".comms_log")},
        observers=[_switched_on(*row) for row in OBSERVERS.items()],
    )
]
