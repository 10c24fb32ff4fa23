"""What a run saves in whose blocks process a part of each sequence."""

from collections import Counter
from dataclasses import dataclass

from ...config import RunConfig
from ...config.training_schedule import make_batch_size
from ...planning.flops import layers_of_run, model_flops
from ...planning.training_length import planned_steps
from ...progress.kept_tokens import KeptTokens


@dataclass(frozen=True)
class Savings:
    """What is saved over a whole run.

    first, last              tokens that a dropping block keeps of a sequence in the first and the last step
    layer_tokens             tokens that blocks process over the run
    token_share, flop_share  ratio to a run that drops nothing
    """

    first: int
    last: int
    layer_tokens: int
    token_share: float
    flop_share: float


def savings(config: RunConfig, drop: KeptTokens) -> Savings:
    """Count the savings step by step, as the batch size and the kept tokens change."""
    layers = layers_of_run(config)
    length = config.model.seq_length
    batch_size = make_batch_size(config)
    vocab = config.padded_vocab_size
    # Steps that keep equally many tokens are counted together.
    samples_at: Counter[int] = Counter()  # kept tokens → samples of such steps
    samples = 0
    steps = planned_steps(config)
    for step in range(steps):
        size = batch_size.at(samples)
        samples_at[drop.kept_at(step, length)] += size
        samples += size
    # Tokens and FLOPs of all steps, as shares of those without dropping.
    dropping = len(drop.blocks)
    flops = sum(
        model_flops(layers, n, length, vocab, kept) for kept, n in samples_at.items()
    )
    tokens = sum(
        n * (dropping * kept + (drop.num_blocks - dropping) * length)
        for kept, n in samples_at.items()
    )
    return Savings(
        drop.kept_at(0, length),
        drop.kept_at(max(0, steps - 1), length),
        tokens,
        tokens / max(1, samples * drop.num_blocks * length),
        flops / max(1.0, model_flops(layers, samples, length, vocab)),
    )
