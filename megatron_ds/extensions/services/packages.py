"""What the services need before a run: their packages, and a folder that can be written."""

from functools import partial
from pathlib import Path

from ...config import RunConfig
from ...training.observe.sink import check_folder, check_package
from .options import ServiceOptions

# The flag that switches a service on, its package, and the extra that installs it.
require_wandb = partial(check_package, "--wandb-project", "wandb", "wandb")
require_comet = partial(check_package, "--comet-project", "comet_ml", "comet")
require_mlflow = partial(check_package, "--mlflow-tracking-uri", "mlflow", "mlflow")
require_otel = partial(
    check_package,
    "--otel-enabled",
    "opentelemetry.exporter.otlp.proto.http",
    "otel",
)


def check_comet_folder(config: RunConfig) -> None:
    """Raise ConfigError unless files can be created in the folder of --comet-offline-dir."""
    if folder := config.of(ServiceOptions).comet_offline_dir:
        check_folder("--comet-offline-dir", Path(folder))
