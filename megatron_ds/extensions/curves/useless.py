"""Times for TensorBoard that no sink would receive."""

from ...config.sources.useless_options import Useless, sends_tags


def rows() -> list[Useless]:
    """Return the rows of `Useless`."""
    return [
        Useless(
            ("logging.log_timers_to_tensorboard",),
            "there is no --tensorboard-dir, nor a service that receives its values",
            lambda config: not sends_tags(config),
        )
    ]
