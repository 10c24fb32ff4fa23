"""Rules about the goldfish loss."""

from collections.abc import Iterator

from ...config.run import RunConfig


def context(config: RunConfig) -> Iterator[str]:
    """A sample has a whole context, and its tokens are predicted one after the other."""
    length = config.model.seq_length
    if length and config.data.goldfish_h > length:
        yield "[goldfish_h] is above [seq_length]: no token has so many before it. Use a shorter context."
    if config.model.model == "bert":
        yield (
            "[goldfish_loss] with [model.model]: BERT predicts masked tokens, and sees those behind them. Use --model "
            "gpt, or remove it."
        )
