"""BERT: the declaration of the feature."""

from ...features import Feature

FEATURES = [
    Feature(
        "bert_model",
        registers={"model": f"{__package__}.bert"},
    )
]
