"""What --dry-run prints, and the text that a run logs at its start: the declaration of the feature."""

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
