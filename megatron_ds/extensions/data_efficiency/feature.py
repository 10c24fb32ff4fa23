"""Curricula and random-LTD: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "data_efficiency",
        rules=(
            own(".rules:lengths"),
            own(".rules:samples"),
            own(".rules:folding"),
            own(".rules:kept_tokens"),
            own(".rules:dropping_blocks"),
            own(".rules:divided_tokens"),
        ),
        provides={
            "curriculum options": own(".options:CurriculumConfig"),
            "token drop options": own(".options:RandomLTDConfig"),
            "difficulty": own(".difficulty:make_difficulty"),
            "metric keys": own(".options:METRIC_KEYS"),
            "sample order": own(".sample_order:make_order"),
            "curriculum sampler": own(".curriculum_sampler:CurriculumSampler"),
            "token rise": own(".difficulty:Rise"),
            "shortened batches": own(".seqlen_curriculum:shortening"),
            "token dropping layers": own(".random_ltd:with_random_ltd"),
        },
    )
]
