"""`CurveOptions`: the part of `LoggingConfig` of files of curves."""

from dataclasses import dataclass

from ...config.options.option import option


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
