"""Files of curves, of TensorBoard and of DeepSpeed's monitor: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later, MetricSink
from .options import CurveOptions

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "curves",
        extends={"logging": CurveOptions},
        useless=own(".useless:rows"),
        sinks=(
            MetricSink(
                lambda config: bool(config.logging.tensorboard_dir),
                make=own(".tensorboard:made"),
                check=own(".folders:check_tensorboard"),
                points=own(".tensorboard:points"),
            ),
            MetricSink(
                lambda config: bool(config.logging.csv_monitor_dir),
                make=own(".csv_monitor:made"),
                check=own(".folders:check_csv"),
                points=own(".csv_monitor:points"),
                has_tags=False,
            ),
        ),
    )
]
