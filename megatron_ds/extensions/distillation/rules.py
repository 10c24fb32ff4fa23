"""Rules about training with a teacher."""

from collections.abc import Iterator

from ...config.run import RunConfig
from .options import DistillationConfig


def distillation(config: RunConfig) -> Iterator[str]:
    """The loss compares predictions of the next token, of every token alone."""
    options = config.of(DistillationConfig)
    if not options.is_on:
        return
    if config.model.model == "bert":
        yield (
            "[distillation.distill_from] with [model.model]: BERT predicts masked tokens, and sees the tokens behind "
            "them. Use --model gpt."
        )
    if config.train.label_smoothing:
        yield (
            "[train.label_smoothing] with --distill-from: the teacher's probabilities take the place of smoothed "
            "labels. Remove it."
        )
