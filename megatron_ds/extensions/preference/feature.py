"""Training on pairs of answers: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Objective, rules_if
from .options import PreferenceConfig

own = partial(Later, __package__)


def _is_on(config: Any) -> bool:
    return config.of(PreferenceConfig).is_on


def _implied(config: Any) -> dict[str, tuple[Any, str]]:
    """Return a row holds the two answers of a pair, and the model has no dropout, as its reference has none."""
    if not _is_on(config):
        return {}
    implied = {
        "model.hidden_dropout": (0.0, "--dpo"),
        "model.attention_dropout": (0.0, "--dpo"),
    }
    if not config.data.mock_data:
        implied["data.pack_documents"] = (True, "--dpo")
    return implied


FEATURES = [
    Feature(
        "preference",
        title="Preferences (DPO)",
        options=PreferenceConfig,
        implies=_implied,
        rules=rules_if(_is_on, own(".rules:pairs")),
        objective=Objective(
            is_on=_is_on,
            data=own(".answer_pairs:pairs_of_answers"),
            loss=own(".pair_loss:pair_loss"),
            start=own(".reference_scores:open_reference"),
            is_of_tokens=False,
        ),
    )
]
