"""Rules about several predicted tokens."""

from collections.abc import Iterator

from ...config.model_facts import facts_of_model
from ...config.run import RunConfig
from ...config.sources.reading import attempt
from ...pipeline.stage_bounds import written_out


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


def divided(config: RunConfig) -> Iterator[str]:
    """Tensor-parallel ranks divide the rows of the projection."""
    ranks = config.parallel.tensor_model_parallel_size
    hidden = config.model.hidden_size
    if hidden % ranks:
        yield (
            f"[mtp_num_layers]: {ranks} tensor-parallel ranks divide the {hidden} rows of each depth's projection. Use "
            "a --hidden-size that is a multiple of --tensor-model-parallel-size."
        )


def stages(config: RunConfig) -> Iterator[str]:
    """The depths are a part of the head, so a layout of the pipeline has them on its stage."""
    layout = config.parallel.pipeline_layout
    letters = attempt([], written_out, layout) if layout else None
    if not letters or "m" not in letters:
        return
    named = letters.count("m")
    if named != config.model.mtp_num_layers:
        yield (
            f"[pipeline_layout] has {named} depths of multi-token prediction (m), and there are [mtp_num_layers]. Give "
            "as many, or none: they are on the stage of L in any case."
        )
    elif letters.rstrip("L").endswith("|") or "m|" in letters:
        yield (
            "[pipeline_layout] has depths of multi-token prediction (m) on another stage than the output layer (L), of "
            "which they are a part here. Write them before L on its stage, such as |t*2mL."
        )


def objectives(config: RunConfig) -> Iterator[str]:
    """Depths learn the next tokens of texts."""
    if config.objective is not None:
        yield (
            "[mtp_num_layers]: this run has another objective than the next token, and its labels are none that a "
            "depth could predict. Remove --mtp-num-layers."
        )
