"""Random layer-wise token dropping as numbers: which blocks drop, how many tokens they keep at a step, what that saves.

Yao et al. 2022 (arXiv:2211.11586, "random-LTD"), section 3: chosen blocks work on a random part of the tokens, the others pass
by them; the part grows in time until it is the whole. DeepSpeed's integers, without its state. Steps count from 0 here, as
upstream's do: the first step of a run asks for `kept_at(0)`, which is `Progress.step`.
"""

from dataclasses import dataclass
from typing import Any

from .difficulty import Difficulty, Rise


@dataclass(frozen=True)
class TokenDrop:
    """blocks: numbers of those that drop, of `num_blocks` in all.  kept: step → tokens of a sequence that they keep."""

    blocks: tuple[int, ...]
    num_blocks: int
    kept: Difficulty

    def kept_at(self, step: int, length: int | None = None) -> int:
        """Tokens of a sequence, of one of `length` tokens at most all."""
        kept = self.kept.at(step)
        return kept if length is None else min(kept, length)

    def layer_tokens(self, step: int, length: int) -> int:
        """Tokens that all blocks together see of one sequence: num_blocks × length where nothing is dropped."""
        return len(self.blocks) * self.kept_at(step, length) + (self.num_blocks - len(self.blocks)) * length

    def layer_tokens_until(self, steps: int, global_batch_size: int, length: int) -> int:
        """Of the first steps of a run whose batches and sequences do not change."""
        return global_batch_size * sum(self.layer_tokens(step, length) for step in range(steps))


def make_token_drop(config: Any) -> TokenDrop | None:
    """What a `RunConfig` describes; None without --random-ltd."""
    routing, model = config.routing, config.model
    if not routing.random_ltd:
        return None
    most = routing.random_ltd_max_tokens or model.seq_length
    # lowest=0: upstream rounds down below its own minimum where that is no multiple, and here the integers are upstream's.
    kept = Rise(routing.random_ltd_min_tokens, most, routing.random_ltd_steps, routing.random_ltd_tokens_per_step, lowest=0)
    return TokenDrop(dropping_blocks(routing, model.num_layers), model.num_layers, kept)


def dropping_blocks(routing: Any, num_blocks: int) -> tuple[int, ...]:
    """As the config names them; else all but the first and the last, which see every token in the paper, too."""
    return tuple(sorted(routing.random_ltd_layer_ids)) or tuple(range(1, num_blocks - 1))
