"""Tasks and benchmarks: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "evaluation",
        provides={
            "evaluation check": own(".harness:check_harness"),
            "evaluation tasks": own(".harness:harness_of_run"),
        },
    )
]
