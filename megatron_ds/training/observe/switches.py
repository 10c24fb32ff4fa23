"""The observers of the package, and the options that switch them on. Those that are off are not imported.

Observers are called in this order, with those of features between the two tables: what decides about a step comes
first, and what measures it is innermost around it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...config import RunConfig
from ...features import Later
from ..observer import Observer

own = partial(Later, __package__)
Switches = Mapping[Later, Callable[[RunConfig], Any]]

# Observer → whether a configuration asks for it.
BEFORE_FEATURES: Switches = {
    own(".facts:Facts"): lambda config: True,
    own("..spikes:DroppedSpikes"): lambda config: config.train.skip_spikes is not None,
    own("..rerun:Reruns"): lambda config: config.train.rerun_bad_steps,
    own(".phase_times:TimedPhases"): (
        lambda config: (
            config.logging.timing_log_level and not config.profiler.flops_profiler
        )
    ),
    own(".flops_profile:ProfiledFlops"): lambda config: config.profiler.flops_profiler,
    own(".tuning:MeasuredSteps"): lambda config: config.profiler.autotuning,
}
AFTER_FEATURES: Switches = {
    own(".ran_kernels:RanKernels"): lambda config: True,
    own(".memory_history:MemoryOfSteps"): (
        lambda config: config.profiler.record_memory_history
    ),
    own(".kernel_profile:ProfiledKernels"): lambda config: config.profiler.profile,
    own(".stragglers:SlowRanks"): lambda config: config.logging.straggler_report,
    own(".noise_scale:GradientNoise"): lambda config: config.profiler.grad_noise_scale,
    own("..replica_check:ComparedReplicas"): (
        lambda config: config.train.check_weight_hash_across_dp_replicas_interval
    ),
    own(".communication_table:CommunicationTable"): (
        lambda config: config.profiler.comms_logger
    ),
    own(".state_statistics:StateNumbers"): (
        lambda config: (
            config.logging.log_params_norm
            or config.logging.log_optimizer_states_to_tensorboard
            or config.logging.log_memory_to_tensorboard
            or config.logging.log_world_size_to_tensorboard
        )
    ),
    own(".trace:TracedSteps"): lambda config: config.logging.trace,
    own(".data_stalls:DataStalls"): lambda config: True,
}


def switched_on(switches: Switches, config: RunConfig) -> list[Observer]:
    """Return the observers of a table that a configuration asks for."""
    return [make() for make, is_wanted in switches.items() if is_wanted(config)]
