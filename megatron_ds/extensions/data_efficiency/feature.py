"""Curricula and random-LTD: the declaration of the features."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Lengths
from .options import CurriculumConfig, RandomLTDConfig

own = partial(Later, __package__)


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
        rules=(own(".rules:lengths"), own(".rules:samples"), own(".rules:folding")),
        lengths=Lengths(
            is_on=lambda config: config.of(CurriculumConfig).changes_lengths,
            make=lambda config: config.of(CurriculumConfig).lengths(
                config.model.seq_length
            ),
            shortened=own(".seqlen_curriculum:shortened"),
        ),
        order=own(".sample_order:order_of"),
        least_length=lambda config: config.of(CurriculumConfig).longest_stated,
        provides={
            "difficulty": own(".difficulty:make_difficulty"),
            "metric keys": own(".options:METRIC_KEYS"),
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
        rules=(
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
