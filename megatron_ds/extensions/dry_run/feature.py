"""What --dry-run prints: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "dry_run",
        dry_run=own(".dry_run:dry_run"),
    )
]
