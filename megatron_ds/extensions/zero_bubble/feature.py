"""Schedules that divide a backward in two: the declaration of the feature."""

from ...features import Feature

NAMES = ("zb-h1", "zb-h2", "zb-auto", "zb-v")

FEATURES = [
    Feature(
        "zero_bubble",
        registers={
            "pipeline schedule": dict.fromkeys(NAMES, f"{__package__}.schedules")
        },
    )
]
