"""Tasks and benchmarks: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later, Tasks

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "evaluation",
        tasks=Tasks(own(".harness:check_harness"), own(".harness:harness_of_run")),
    )
]
