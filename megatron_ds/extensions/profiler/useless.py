"""Values for TensorBoard that no sink would receive."""

from ...config.sources.useless_options import Useless, sends_tags
from .log_options import TO_TENSORBOARD


def rows() -> list[Useless]:
    """Return the rows of `Useless`."""
    return [
        Useless(
            TO_TENSORBOARD,
            "there is no --tensorboard-dir, nor a service that receives its values",
            lambda config: not sends_tags(config),
        )
    ]
