"""Curricula and random-LTD: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "data_efficiency",
        rules=(
            own(".data_efficiency_rules:lengths"),
            own(".data_efficiency_rules:samples"),
            own(".data_efficiency_rules:folding"),
            own(".data_efficiency_rules:kept_tokens"),
            own(".data_efficiency_rules:dropping_blocks"),
            own(".data_efficiency_rules:divided_tokens"),
        ),
        provides={
            "curriculum options": own(".data_efficiency_options:CurriculumConfig"),
            "token drop options": own(".data_efficiency_options:RandomLTDConfig"),
            "difficulty": own(".difficulty:make_difficulty"),
            "metric keys": own(".data_efficiency_options:METRIC_KEYS"),
            "sample order": own(".sample_order:make_order"),
            "curriculum sampler": own(".curriculum_sampler:CurriculumSampler"),
            "token rise": own(".difficulty:Rise"),
            "shortened batches": own(".seqlen_curriculum:shortening"),
            "token dropping layers": own(".random_ltd:with_random_ltd"),
        },
    )
]
