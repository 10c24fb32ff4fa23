"""Files of curves and services that collect metrics: the declaration of the feature."""

from functools import partial

from ...features import NO_TAGS, Feature, Later, MetricSink
from .options import CurveOptions, ServiceOptions

own = partial(Later, __package__)
NAMES = ("wandb", "report-to", "comet", "mlflow")
WHERE = (
    "metrics go to the log, to --metrics-jsonl and to --tensorboard-dir, and with --wandb-project, --comet-project, "
    "--mlflow-tracking-uri or --otel-enabled to a service"
)


def _is_given(option: str):
    """Return the function that reads whether an option of a configuration is given."""
    return lambda config: bool(getattr(config.of(ServiceOptions), option))


FEATURES = [
    Feature(
        "services",
        title="Services that collect metrics",
        options=ServiceOptions,
        formerly="logging",
        extends={"logging": CurveOptions},
        useless=((("logging.log_timers_to_tensorboard",), NO_TAGS),),
        synonyms=dict.fromkeys(NAMES, WHERE)
        | dict.fromkeys(("otel", "opentelemetry"), "--otel-enabled"),
        sinks=(
            MetricSink(
                lambda config: bool(config.logging.tensorboard_dir),
                make=own(".tensorboard:made"),
                check=own(".folders:check_tensorboard"),
                require=own(".folders:require_tensorboard"),
                points=own(".tensorboard:points"),
            ),
            MetricSink(
                lambda config: bool(config.logging.csv_monitor_dir),
                make=own(".csv_monitor:made"),
                check=own(".folders:check_csv"),
                points=own(".csv_monitor:points"),
                has_tags=False,
            ),
            MetricSink(
                _is_given("wandb_project"),
                make=own(".wandb_log:WandbLog"),
                require=own(".packages:require_wandb"),
                points=own(".wandb_log:WandbPoints"),
            ),
            MetricSink(
                _is_given("comet_project"),
                make=own(".comet_log:CometLog"),
                check=own(".packages:check_comet_folder"),
                require=own(".packages:require_comet"),
                points=own(".comet_log:CometPoints"),
            ),
            MetricSink(
                _is_given("mlflow_tracking_uri"),
                make=own(".mlflow_log:MlflowLog"),
                require=own(".packages:require_mlflow"),
            ),
            MetricSink(
                _is_given("otel_enabled"),
                make=own(".otel_log:OtelLog"),
                require=own(".packages:require_otel"),
            ),
        ),
    )
]
