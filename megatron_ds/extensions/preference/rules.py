"""Rules about training on pairs of answers."""

from collections.abc import Iterator

from ...config.run import RunConfig
from .options import PreferenceConfig


def pairs(config: RunConfig) -> Iterator[str]:
    """Samples are whole pairs of a corpus, and their loss is that of the pairs alone."""
    if not config.of(PreferenceConfig).is_on:
        return
    # The data.
    data = config.data
    if config.model.model == "bert":
        yield (
            "[preference.dpo] with [model.model]: BERT does not predict the next token, so that its answers have no "
            "probability. Use --model gpt."
        )
    if data.mock_data:
        yield "[preference.dpo] with [data.mock_data]: random tokens are no answers. Remove one of the two."
    if data.sft:
        yield (
            "[preference.dpo] with [data.sft]: one trains on pairs of answers, the other on each answer alone. Remove "
            "one of the two."
        )
    if not data.pack_documents and not data.mock_data:
        yield "[data.pack_documents] with --dpo: a row holds the two answers of a pair. Remove it."
    if config.changed_lengths is not None:
        yield "[preference.dpo] with [curriculum.curriculum_type]: shorter rows cut pairs. Remove one of the two."
    # The loss.
    for path in ("train.calculate_per_token_loss", "train.label_smoothing"):
        if config.get(path):
            advice = "" if "per" in path else ", or use --dpo-label-smoothing"
            yield f"[{path}] with --dpo: the loss is a mean over pairs, not over tokens. Remove it{advice}."
