"""Rules about the loss of the normalizer."""

from collections.abc import Iterator

from ...config.run import RunConfig


def normalized(config: RunConfig) -> Iterator[str]:
    """The loss is that of the next token, without smoothed labels."""
    if config.model.model == "bert":
        yield (
            "[z_loss.z_loss_strength] with [model.model]: BERT has a second loss, of pairs of sentences. Use --model "
            "gpt, or remove it."
        )
    if config.train.label_smoothing:
        yield (
            "[train.label_smoothing] with --z-loss-strength: smoothed labels bound the logits already. Remove one of "
            "the two."
        )
