"""Rules about several predicted tokens."""

from collections.abc import Iterator

from ...config.model_facts import facts_of_model
from ...config.run import RunConfig


def models(config: RunConfig) -> Iterator[str]:
    """The model sees earlier tokens alone."""
    if not facts_of_model(config.model.model).is_causal:
        yield (
            "[mtp_num_layers] with [model]: that model sees the tokens that a depth would predict. Remove "
            "--mtp-num-layers, or use --model gpt."
        )


def positions(config: RunConfig) -> Iterator[str]:
    """A depth looks up words alone: positions enter in attention, and no norm follows the embedding."""
    model = config.model
    if model.position_embedding_type == "learned_absolute":
        yield (
            "[mtp_num_layers] with [position_embedding_type]: the embedding of a later token would need the vector "
            "of its position, too, which no published model has. Use --position-embedding-type rope, yarn, alibi or "
            "none."
        )
    if model.embed_layernorm:
        yield (
            "[mtp_num_layers] with [embed_layernorm]: each depth has a norm of its own behind the embedding. "
            "Remove one of the two."
        )


def lengths(config: RunConfig) -> Iterator[str]:
    """The last depth has a token to predict."""
    model = config.model
    if model.seq_length and model.mtp_num_layers >= model.seq_length:
        yield (
            "[mtp_num_layers] is not below [seq_length]: the last depth has no token of the sample to predict. Use "
            f"--mtp-num-layers {model.seq_length - 1} or fewer."
        )


def objectives(config: RunConfig) -> Iterator[str]:
    """Depths learn the next tokens of texts."""
    if config.objective is not None:
        yield (
            "[mtp_num_layers]: this run has another objective than the next token, and its labels are none that a "
            "depth could predict. Remove --mtp-num-layers."
        )
