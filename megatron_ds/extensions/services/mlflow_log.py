"""The sink for MLflow, under the same names as TensorBoard."""

import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ...config import RunConfig
from ...config.saved_values import to_dict
from ...errors import ConfigError
from ...training.observe.records import Record
from ..curves.tensorboard import scalars_of
from .options import ServiceOptions

RUN_TAG = "megatron_ds.run"
# Limits of the server: parameters of one request, characters of a value.
MOST_PARAMS = 100
LONGEST_VALUE = 6000


class MlflowLog:
    """Writes to one run of MLflow. A process that resumes finds it by the tag `RUN_TAG`, the id of the run.

    Parameters are the settings of the first process, since MLflow lets none change.
    """

    place = "MLflow"

    def __init__(self, config: RunConfig, run_id: str):
        options = config.of(ServiceOptions)
        self._timers = config.logging.log_timers_to_tensorboard
        self._mlflow = import_module("mlflow")
        try:
            self._client = self._mlflow.MlflowClient(options.mlflow_tracking_uri)
            self._run = self._run_of(config, run_id)
        except (
            Exception
        ) as error:  # MLflow's own errors have no common base with OSError
            raise ConfigError(
                f"--mlflow-tracking-uri {options.mlflow_tracking_uri}: MLflow cannot start a run: {error} Give "
                "the address of a server, or a database such as sqlite:///mlflow.db."
            ) from error

    def write(self, record: Record) -> None:
        """Log the values of the record at its step. Raises OSError."""
        losses, others = scalars_of(record, self._timers)
        values = {**losses, **others, "samples": record.samples}
        now = round(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        points = [
            metric(name, value, now, record.step) for name, value in values.items()
        ]
        try:
            self._client.log_batch(self._run, metrics=points)
        except Exception as error:  # any kind, as above
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run)

    def _run_of(self, config: RunConfig, run_id: str) -> str:
        """Return MLflow's id of the run; make the run if there is none."""
        # An earlier process may have made the run.
        name = config.of(ServiceOptions).mlflow_experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = self._client.create_experiment(name)
        else:
            place = experiment.experiment_id
        found = self._client.search_runs([place], f"tags.`{RUN_TAG}` = '{run_id}'")
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0].info.run_id
        # The server takes only some parameters in one request.
        run = self._client.create_run(
            place,
            tags={RUN_TAG: run_id},
            run_name=config.of(ServiceOptions).mlflow_run_name,
        )
        param = self._mlflow.entities.Param
        params = [
            param(path, str(value)[:LONGEST_VALUE])
            for path, value in _flat(to_dict(config))
        ]
        for first in range(0, len(params), MOST_PARAMS):
            some = params[first : first + MOST_PARAMS]
            self._client.log_batch(run.info.run_id, params=some)
        return run.info.run_id


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each option with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value
