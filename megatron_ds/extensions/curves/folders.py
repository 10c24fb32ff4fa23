"""Checks of the folders of curves."""

from pathlib import Path

from ...config import RunConfig
from ...training.observe.sink import check_folder


def check_tensorboard(config: RunConfig) -> None:
    """Raises ConfigError where nothing can be written in --tensorboard-dir."""
    check_folder("--tensorboard-dir", Path(config.logging.tensorboard_dir))


def check_csv(config: RunConfig) -> None:
    """Raises ConfigError where nothing can be written in --csv-monitor-dir."""
    check_folder("--csv-monitor-dir", Path(config.logging.csv_monitor_dir))
