"""What random-LTD saves over a whole run: layer-tokens as integers, and model FLOPs. Pure."""

from dataclasses import dataclass

from ..config import RunConfig
from ..config.training_schedule import make_batch_size
from ..difficulty import TokenDrop
from .flops import model_flops
from .training_length import planned_steps


@dataclass(frozen=True)
class Saving:
    """first, last: kept tokens of the first and of the last step.  Shares: of what they are when nothing is dropped."""

    first: int
    last: int
    layer_tokens: int
    token_share: float
    flop_share: float


def saving_of(config: RunConfig, drop: TokenDrop) -> Saving:
    """Step by step, as the batch grows."""
    model, length, batch_size = config.model, config.model.seq_length, make_batch_size(config)
    vocab = config.padded_vocab_size
    samples_at: dict[int, int] = {}                                             # kept tokens → samples of such steps
    samples, steps = 0, planned_steps(config)
    for step in range(steps):
        kept, size = drop.kept_at(step, length), batch_size.at(samples)
        samples_at[kept] = samples_at.get(kept, 0) + size
        samples += size
    whole = len(drop.blocks), length
    flops = sum(model_flops(model, n, length, vocab, len(drop.blocks), kept) for kept, n in samples_at.items())
    tokens = sum(n * (len(drop.blocks) * kept + (drop.num_blocks - len(drop.blocks)) * length)
                 for kept, n in samples_at.items())
    return Saving(drop.kept_at(0, length), drop.kept_at(max(0, steps - 1), length), tokens,
                  tokens / max(1, samples * drop.num_blocks * length),
                  flops / max(1.0, model_flops(model, samples, length, vocab, *whole)))
