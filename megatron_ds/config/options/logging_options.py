"""Options of the log: lines, TensorBoard, CSV files, services that collect metrics."""

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
    wandb_project: str | None = option(
        None,
        per_host=True,
        json="wandb.project",
        help="Project of Weights & Biases, which then receives the values of TensorBoard. Needs the package "
        "wandb.",
    )
    wandb_exp_name: str | None = option(
        None, per_host=True, help="Name of the run in --wandb-project."
    )
    wandb_entity: str | None = option(
        None, per_host=True, json="wandb.team", help="Team or user of --wandb-project."
    )
    wandb_group: str | None = option(
        None,
        per_host=True,
        json="wandb.group",
        flags=["--wandb-group-name"],
        help="Group of the run in --wandb-project.",
    )
    wandb_save_dir: str | None = option(
        None, per_host=True, help="Folder for the files of W&B."
    )
    comet_project: str | None = option(
        None,
        per_host=True,
        json="comet.project",
        help="Project of Comet, which then receives the values of TensorBoard. Needs the package comet_ml; "
        "COMET_API_KEY has the key.",
    )
    comet_workspace: str | None = option(
        None,
        per_host=True,
        json="comet.workspace",
        needs=need("logging.comet_project"),
        help="Workspace of --comet-project.",
    )
    comet_experiment_name: str | None = option(
        None,
        per_host=True,
        json="comet.experiment_name",
        needs=need("logging.comet_project"),
        help="Name of the experiment in --comet-project.",
    )
    comet_offline_dir: str | None = option(
        None,
        per_host=True,
        needs=need("logging.comet_project"),
        help="Folder for Comet's archives, which comet upload sends later. Default: values are sent at once.",
    )
    mlflow_tracking_uri: str | None = option(
        None,
        per_host=True,
        help="Address of an MLflow server, or a database such as sqlite:///mlflow.db, which then receives the "
        "values of TensorBoard. Needs the package mlflow or mlflow-skinny.",
    )
    mlflow_experiment: str = option(
        "megatron_ds",
        per_host=True,
        needs=need("logging.mlflow_tracking_uri"),
        help="Experiment of --mlflow-tracking-uri; it is made if there is none.",
    )
    mlflow_run_name: str | None = option(
        None,
        per_host=True,
        needs=need("logging.mlflow_tracking_uri"),
        help="Name of the run in --mlflow-experiment.",
    )
    otel_enabled: bool = option(
        False,
        per_host=True,
        help="Send the values of TensorBoard by OpenTelemetry (OTLP over HTTP): a span for each log interval "
        "and evaluation, and gauges. OTEL_EXPORTER_OTLP_ENDPOINT has the address.",
    )
    otel_service_name: str = option(
        "megatron_ds",
        per_host=True,
        needs=need("logging.otel_enabled"),
        help="service.name of --otel-enabled.",
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
