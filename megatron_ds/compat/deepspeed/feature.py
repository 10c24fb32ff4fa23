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
            "foreign names": own(".deepspeed_modules:find"),
            "foreign modules": own(".deepspeed_modules:Finder"),
            "moved modules": own("..moved_modules:MovedFinder"),
        },
    )
]
