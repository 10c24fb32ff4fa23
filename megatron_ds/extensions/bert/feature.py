"""BERT: the declaration of the feature."""

from functools import partial
from typing import Any

from ...config.model_facts import ModelFacts
from ...features import Feature, Later, NoEffect, rules_if
from .options import BertConfig, BertHeadOptions

own = partial(Later, __package__)
NAME = "bert"
# Megatron's scripts for a GPT have them, too, and do not read them.
OF_SAMPLES = ("bert.mask_prob", "bert.short_seq_prob")


def _is_other(config: Any) -> bool:
    return config.model.model != NAME


def _implied(config: Any) -> dict[str, tuple[Any, str]]:
    """Return the tokenizer of Megatron's entry script, if a file of it is given without its type."""
    data = config.data
    if config.model.model != NAME or data.mock_data or not data.vocab_file:
        return {}
    if data.tokenizer_type is not None:
        return {}
    return {"data.tokenizer_type": ("BertWordPieceLowerCase", "--vocab-file")}


FEATURES = [
    Feature(
        NAME,
        title="BERT's samples",
        options=BertConfig,
        extends={"model": BertHeadOptions},
        implies=_implied,
        rules=rules_if(
            lambda config: config.model.model == NAME, own(".rules:samples")
        ),
        registers={
            "model": {"bert": f"{__package__}.bert"},
            "tokenizer": {
                "BertWordPieceLowerCase": f"{__package__}.tokenizers",
                "BertWordPieceCase": f"{__package__}.tokenizers",
            },
        },
        useless=[(OF_SAMPLES, NoEffect("it describes samples of BERT", _is_other))],
        models={NAME: ModelFacts(is_causal=False)},
    )
]
