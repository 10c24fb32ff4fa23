"""The sink for Comet, under the same names as TensorBoard."""

import hashlib
from collections.abc import Mapping
from importlib import import_module

from ...config import RunConfig
from ...config.saved_values import to_dict
from ...errors import ConfigError
from ...training.observe.records import Record
from ..curves.tensorboard import scalars_of
from .options import ServiceOptions


class CometPoints:
    """Points of one experiment of Comet, which continues under the same key after a resume.

    With --comet-offline-dir each process writes an archive there, which `comet upload` sends.
    """

    place = "Comet"

    def __init__(self, config: RunConfig, run_id: str):
        options = config.of(ServiceOptions)
        try:
            self._experiment = _experiment(config, run_id)
            if options.comet_experiment_name:
                self._experiment.set_name(options.comet_experiment_name)
            self._experiment.log_parameters(to_dict(config))
        except (
            Exception
        ) as error:  # Comet's own errors have no common base with OSError
            raise ConfigError(
                f"--comet-project: Comet cannot start an experiment: {error}. Set COMET_API_KEY, or give "
                "--comet-offline-dir, a folder for archives that comet upload sends later."
            ) from error

    def write(self, values: Mapping[str, float], x: int) -> None:
        """Log a point of each curve. Raises OSError."""
        try:
            self._experiment.log_metrics(values, step=x)
        except Exception as error:  # any kind, as above
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send what is waiting, or complete the archive."""
        self._experiment.end()


class CometLog:
    """The sink of records."""

    place = CometPoints.place

    def __init__(self, config: RunConfig, run_id: str):
        self._points = CometPoints(config, run_id)
        self._timers = config.logging.log_timers_to_tensorboard

    def write(self, record: Record) -> None:
        """Log the values of the record at its step. Raises OSError."""
        losses, others = scalars_of(record, self._timers)
        values = {**losses, **others, "samples": record.samples}
        self._points.write(values, record.step)

    def close(self) -> None:
        """Send what is waiting, or complete the archive."""
        self._points.close()


def _experiment(config: RunConfig, run_id: str):
    comet = import_module("comet_ml")
    options = config.of(ServiceOptions)
    # The experiment describes the run, not the process: no code, output or environment is collected.
    collected = comet.ExperimentConfig(
        log_code=False,
        log_git_metadata=False,
        log_git_patch=False,
        auto_output_logging=False,
        auto_metric_logging=False,
        auto_param_logging=False,
        auto_histogram_weight_logging=False,
        disabled=False,
        log_env_details=False,
        display_summary_level=0,
        offline_directory=options.comet_offline_dir,
    )
    return comet.start(
        project_name=options.comet_project,
        workspace=options.comet_workspace,
        experiment_key=experiment_key(run_id),
        mode="get_or_create",
        online=options.comet_offline_dir is None,
        experiment_config=collected,
    )


def experiment_key(run_id: str) -> str:
    """Return the key of the run's experiment: 32 letters and digits, as Comet requires."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:32]
