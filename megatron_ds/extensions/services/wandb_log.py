"""The sink for Weights & Biases, under the same names as TensorBoard."""

from collections.abc import Mapping
from importlib import import_module

from ...config import RunConfig
from ...config.saved_values import to_dict
from ...errors import ConfigError
from ...training.observe.records import Record
from ..curves.tensorboard import scalars_of
from .options import ServiceOptions


class WandbPoints:
    """Points of one run of W&B, which continues under the same id after a resume."""

    place = "Weights & Biases"

    def __init__(self, config: RunConfig, run_id: str):
        options = config.of(ServiceOptions)
        try:
            self._run = import_module("wandb").init(
                project=options.wandb_project,
                name=options.wandb_exp_name,
                entity=options.wandb_entity,
                group=options.wandb_group,
                dir=options.wandb_save_dir,
                id=run_id,
                resume="allow",
                config=to_dict(config),
            )
        except Exception as error:  # W&B's own errors have no common base with OSError
            raise ConfigError(
                f"--wandb-project: W&B cannot start a run: {error}. Run wandb login, or set "
                "WANDB_MODE=offline."
            ) from error

    def write(self, values: Mapping[str, float], x: int) -> None:
        """Log a point of each curve. Raises OSError."""
        try:
            # Not committed: W&B adds later values of the same x, such as validation losses.
            self._run.log(values, step=x)
        except Exception as error:  # any kind, as above
            raise OSError(str(error)) from error


class WandbLog:
    """The sink of records."""

    place = WandbPoints.place

    def __init__(self, config: RunConfig, run_id: str):
        self._points = WandbPoints(config, run_id)
        self._timers = config.logging.log_timers_to_tensorboard

    def write(self, record: Record) -> None:
        """Log the values of the record at its step. Raises OSError."""
        losses, others = scalars_of(record, self._timers)
        values = {**losses, **others, "samples": record.samples}
        self._points.write(values, record.step)
