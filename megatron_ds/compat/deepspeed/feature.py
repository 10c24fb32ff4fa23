"""DeepSpeed's names: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "deepspeed_names",
        provides={
            "elastic check": own(".elasticity:compute_elastic_config"),
            "elastic enabled": own(".elasticity:elasticity_enabled"),
            "deepspeed environment": own(".program_environment:environment_with_name"),
            "foreign names": own(".modules:find"),
            "foreign modules": own(".modules:Finder"),
        },
    )
]
