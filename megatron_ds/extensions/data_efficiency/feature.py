"""Curricula and random-LTD: the declaration of the features."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Lengths, rules_if
from .options import CurriculumConfig, RandomLTDConfig

own = partial(Later, __package__)
LENGTHS = own(".curricula:lengths_of")


def _is_on(config: Any) -> bool:
    curriculum = config.of(CurriculumConfig)
    return curriculum.changes_lengths or curriculum.orders_samples


def _kept(config: Any) -> Any:
    model = config.model
    return config.of(RandomLTDConfig).kept_tokens(model.num_layers, model.seq_length)


FEATURES = [
    Feature(
        "curriculum",
        title="Curriculum",
        options=CurriculumConfig,
        is_on=_is_on,
        rules=rules_if(
            lambda config: config.of(CurriculumConfig) != CurriculumConfig(),
            own(".rules:lengths"),
            own(".rules:samples"),
            own(".rules:folding"),
        ),
        lengths=Lengths(
            is_on=lambda config: config.of(CurriculumConfig).changes_lengths,
            make=lambda config: LENGTHS(
                config.of(CurriculumConfig), config.model.seq_length
            ),
            shortened=own(".seqlen_curriculum:shortened"),
        ),
        order=own(".sample_order:order_of"),
        least_length=lambda config: config.of(CurriculumConfig).longest_stated,
        provides={
            "difficulty": own(".difficulty:make_difficulty"),
            "metric keys": own(".curricula:METRIC_KEYS"),
            "curriculum sampler": own(".curriculum_sampler:CurriculumSampler"),
            "token rise": own(".difficulty:Rise"),
        },
    ),
    Feature(
        "random_ltd",
        title="Random-LTD",
        options=RandomLTDConfig,
        is_on=lambda config: config.of(RandomLTDConfig).random_ltd,
        formerly="routing",
        rules=rules_if(
            lambda config: config.of(RandomLTDConfig).random_ltd,
            own(".rules:kept_tokens"),
            own(".rules:dropping_blocks"),
            own(".rules:divided_tokens"),
        ),
        layers=own(".random_ltd:dropping_layers"),
        after=("adapters",),
        kept=_kept,
        least_length=lambda config: config.of(RandomLTDConfig).longest_stated,
    ),
]
