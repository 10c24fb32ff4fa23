"""`ServiceOptions`: the options of services that collect metrics. `CurveOptions`: the part of `LoggingConfig` of files
of curves."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option


@dataclass(frozen=True)
class ServiceOptions:
    """Each service is off unless its first option is given."""

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
        needs=need("services.comet_project"),
        help="Workspace of --comet-project.",
    )
    comet_experiment_name: str | None = option(
        None,
        per_host=True,
        json="comet.experiment_name",
        needs=need("services.comet_project"),
        help="Name of the experiment in --comet-project.",
    )
    comet_offline_dir: str | None = option(
        None,
        per_host=True,
        needs=need("services.comet_project"),
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
        needs=need("services.mlflow_tracking_uri"),
        help="Experiment of --mlflow-tracking-uri; it is made if there is none.",
    )
    mlflow_run_name: str | None = option(
        None,
        per_host=True,
        needs=need("services.mlflow_tracking_uri"),
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
        needs=need("services.otel_enabled"),
        help="service.name of --otel-enabled.",
    )


@dataclass(frozen=True)
class CurveOptions:
    """Rank 0 writes them."""

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
    log_timers_to_tensorboard: bool = option(
        False,
        help="Write the times of --timing-log-level to TensorBoard and W&B: of each, the largest of all "
        "ranks.",
    )
