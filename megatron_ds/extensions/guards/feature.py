"""Guards of the steps of a run: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later
from .options import GuardOptions

own = partial(Later, __package__)
SPIKES = own(".spikes:DroppedSpikes")
RERUNS = own(".rerun:Reruns")
REPLICAS = own(".replica_check:ComparedReplicas")


def spikes(config: Any) -> Any | None:
    """Return the observer of --skip-spikes."""
    return None if config.train.skip_spikes is None else SPIKES()


def reruns(config: Any) -> Any | None:
    """Return the observer of --rerun-bad-steps."""
    return RERUNS() if config.train.rerun_bad_steps else None


def replicas(config: Any) -> Any | None:
    """Return the observer of --check-weight-hash-across-dp-replicas-interval."""
    train = config.train
    return REPLICAS() if train.check_weight_hash_across_dp_replicas_interval else None


FEATURES = [
    Feature(
        "guards",
        extends={"train": GuardOptions},
        provides={
            "second reading": own(".second_reading:with_second_reading"),
            "locator of values that are not finite": own(
                ".nan_locator:locate_nonfinite"
            ),
        },
        checksums=lambda config: config.train.rerun_bad_steps,
        observers=[spikes, reruns, replicas],
    )
]
