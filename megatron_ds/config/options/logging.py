"""Options of the log: lines, TensorBoard, CSV files."""

from dataclasses import dataclass

from .need import need
from .option import option


@dataclass(frozen=True)
class LoggingConfig:
    """Rank 0 writes the log."""

    log_interval: int = option(
        100,
        at_least=1,
        json="steps_per_print",
        unit="iterations",
        help="Steps between log lines.",
    )
    tensorboard_dir: str | None = option(
        None,
        per_host=True,
        help="Directory for TensorBoard events. Default: none are written.",
    )
    csv_monitor_dir: str | None = option(
        None,
        per_host=True,
        help="Directory for CSV files, one for each logged value. Default: none are written.",
    )
    metrics_path: str | None = option(
        None,
        per_host=True,
        flags=["--metrics-jsonl"],
        help="File to which the record of each log line is appended as JSON. Default: metrics.jsonl in the "
        "--save directory, if there is one.",
    )
    log_params_norm: bool = option(
        False,
        help="Log the norm of all weights, as params norm.",
        avoid="It reads all weights at each log line.",
    )
    log_num_zeros_in_grad: bool = option(
        False,
        help="Log the number of elements of the gradient that are exactly zero; as in Megatron, those "
        "of rows that pad the vocabulary count, so it depends on --tensor-model-parallel-size.",
        avoid="It reads the gradients once more in each step.",
    )
    log_memory_to_tensorboard: bool = option(
        False, help="Write the memory of rank 0 to TensorBoard and W&B."
    )
    log_world_size_to_tensorboard: bool = option(
        False, help="Write the number of ranks to TensorBoard and W&B."
    )
    log_timers_to_tensorboard: bool = option(
        False,
        help="Write the times of --timing-log-level to TensorBoard and W&B: of each, the largest of all "
        "ranks.",
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
    progress_bar: bool = option(
        True,
        per_host=True,
        help="Show a progress bar while stdout is a terminal. Log files never contain one.",
        avoid="Turn it off where a recording of the terminal must hold plain lines.",
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
