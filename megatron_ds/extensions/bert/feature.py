"""BERT: the declaration of the feature."""

from ...features import Feature

FEATURES = [
    Feature(
        "bert_model",
        registers={"model": {"bert": f"{__package__}.bert"}},
    )
]
