"""Training on pairs of answers: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Objective
from .options import PreferenceConfig

own = partial(Later, __package__)


def _implied(config: Any) -> dict[str, tuple[Any, str]]:
    """Return a row holds the two answers of a pair, and the model has no dropout, as its reference has none."""
    if not config.of(PreferenceConfig).is_on:
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
        rules=(own(".rules:pairs"),),
        objective=Objective(
            is_on=lambda config: config.of(PreferenceConfig).is_on,
            data=own(".answer_pairs:pairs_of_answers"),
            loss=own(".pair_loss:pair_loss"),
            start=own(".reference_scores:open_reference"),
            is_of_tokens=False,
        ),
    )
]
