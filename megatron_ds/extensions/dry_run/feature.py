"""What --dry-run prints, and what a run says of itself at its start: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "dry_run",
        dry_run=own(".dry_run:dry_run"),
        described=own(".startup_text:describe"),
    )
]
