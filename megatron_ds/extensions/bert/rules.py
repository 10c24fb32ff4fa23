"""Rules about BERT."""

from collections.abc import Iterator

from ...config.messages import given
from ...config.run import RunConfig

SHORTEST = 8  # [CLS] A [SEP] B [SEP] with a few tokens in each segment
OF_GPT = (
    "data.eod_mask_loss",
    "data.reset_position_ids",
    "data.reset_attention_mask",
    "data.fim_data",
    "data.pack_documents",
    "data.sft",
)


def samples(config: RunConfig) -> Iterator[str]:
    """A sample of BERT is a pair of segments of one document, without a causal mask."""
    if config.model.model != "bert":
        return
    yield from given(
        config,
        OF_GPT,
        "applies to samples of several documents, but a sample of BERT is from "
        "one document. Remove it.",
    )
    if config.model.position_embedding_type == "none":
        yield (
            "[position_embedding_type]: BERT has no causal mask, so without position embeddings the order "
            "of tokens would be lost. Use --position-embedding-type learned_absolute, rope, yarn or "
            "alibi."
        )
    if config.model.seq_length and config.model.seq_length < SHORTEST:
        yield f"[seq_length] leaves no room for [CLS] A [SEP] B [SEP]. Use --seq-length {SHORTEST} or more."
