"""`MeasuredLogOptions`: the part of `LoggingConfig` of what is measured for the log."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

# Options of values that have a tag of TensorBoard, and no place in the line.
TO_TENSORBOARD = (
    "logging.log_memory_to_tensorboard",
    "logging.log_world_size_to_tensorboard",
    "logging.log_optimizer_states_to_tensorboard",
)


@dataclass(frozen=True)
class MeasuredLogOptions:
    """Times and norms beside those of the log line, slow ranks and traces."""

    log_params_norm: bool = option(
        False,
        help="Log the norm of all weights, as params norm.",
        avoid="It reads all weights at each log line.",
    )
    log_memory_to_tensorboard: bool = option(
        False, help="Write the memory of rank 0 to TensorBoard and W&B."
    )
    log_world_size_to_tensorboard: bool = option(
        False, help="Write the number of ranks to TensorBoard and W&B."
    )
    log_optimizer_states_to_tensorboard: bool = option(
        False,
        help="Write norms and largest values of Adam's moments and of the weights to TensorBoard and W&B.",
        avoid="It reads the whole state at each log line.",
    )
    timing_log_level: int = option(
        0,
        choices=(0, 1, 2),
        json="wall_clock_breakdown",
        values={"true": 2, "false": 0},
        help="Times that are logged beside that of a step. 1: forward-backward and optimizer; 2: also "
        "computations, transfers and the wait for data.",
        avoid="At 2, transfers of the pipeline overlap less with computations.",
    )
    timing_log_option: str = option(
        "minmax",
        choices=("max", "minmax", "all"),
        help="Which times of --timing-log-level are printed: the largest of all ranks, the smallest and the "
        "largest, or those of all ranks.",
    )
    straggler_report: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Steps between reports that name ranks whose computation takes more than 1.2 times the median, with "
        "their hosts. Default: none.",
        avoid="On GPUs the host waits for the device in a step that is measured, so not in each step.",
    )
    trace: str | None = option(
        None,
        help="Directory for timelines of the pipeline's instructions, one file per pipeline rank, for "
        "megatron-ds schedule or chrome://tracing. Default: none are written.",
    )
    trace_steps: tuple[int, ...] | None = option(
        None,
        count=2,
        at_least=1,
        unit="steps",
        needs=need("logging.trace"),
        help="FIRST LAST: the steps that --trace records, counted from the start of this process. Default: "
        "2 3.",
        avoid="The first step is slower than the others.",
    )
