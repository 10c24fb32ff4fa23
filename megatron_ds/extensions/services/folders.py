"""Checks of the folders of curves, and of the package that writes them."""

from functools import partial
from pathlib import Path

from ...config import RunConfig
from ...training.observe.sink import check_folder, check_package

require_tensorboard = partial(
    check_package, "--tensorboard-dir", "tensorboard", "report"
)


def check_tensorboard(config: RunConfig) -> None:
    """Raises ConfigError where nothing can be written in --tensorboard-dir."""
    check_folder("--tensorboard-dir", Path(config.logging.tensorboard_dir))


def check_csv(config: RunConfig) -> None:
    """Raises ConfigError where nothing can be written in --csv-monitor-dir."""
    check_folder("--csv-monitor-dir", Path(config.logging.csv_monitor_dir))
