"""Rules about the positions of tokens: learned ones, and rotary angles that are scaled for long sequences."""

import math
from collections.abc import Iterator

from ..run import RunConfig


def positions(config: RunConfig) -> Iterator[str]:
    """Each token of a sample needs a position."""
    seq = config.model.seq_length
    longest = config.model.max_position_embeddings
    if seq and longest and seq > longest:
        yield (
            "[seq_length] is longer than [max_position_embeddings]: the last tokens would have no "
            f"position. Use --max-position-embeddings {seq} or more, or --seq-length {longest} or less."
        )


def rotary(config: RunConfig) -> Iterator[str]:
    """Options of rotary embeddings need them."""
    # A factor of 1 changes nothing.
    model = config.model
    factor = model.rotary_seq_len_interpolation_factor
    if factor not in (None, 1) and model.position_embedding_type != "rope":
        yield (
            "[rotary_seq_len_interpolation_factor] scales the frequencies of rope, but [position_embedding_type]. "
            "Remove it, or use --position-embedding-type rope."
        )
    # Two ways to scale.
    if model.use_rope_scaling and model.rotary_ntk_factor is not None:
        yield "[use_rope_scaling] and [rotary_ntk_factor] both scale low frequencies. Give only one."


def original_length(config: RunConfig) -> Iterator[str]:
    """What is lengthened has a length."""
    # The length has a use.
    model = config.model
    original = model.original_max_position_embeddings
    is_yarn = model.position_embedding_type == "yarn"
    name = "[position_embedding_type]" if is_yarn else "[rotary_ntk_factor]"
    is_needed = is_yarn or model.rotary_ntk_factor is not None
    # Frequencies that are scaled have a length.
    if not is_needed:
        return
    if original is None:
        yield (
            f"{name} needs the length of the sequences that the model was trained with before. Add "
            "--original-max-position-embeddings N."
        )
    elif model.seq_length and original > model.positions:
        yield (
            f"[original_max_position_embeddings] is longer than the {model.positions} positions of the "
            f"model: {name} lengthens sequences. Use --max-position-embeddings {original} or more."
        )
    elif is_yarn:
        yield from _yarn(model.yarn_beta_fast, model.yarn_beta_slow, original)


def _yarn(fast: float, slow: float, original: int) -> Iterator[str]:
    if fast < slow:
        yield (
            "[yarn_beta_fast] is less than [yarn_beta_slow]: waves with more turns are unchanged, those "
            "with fewer are stretched. Exchange the two."
        )
    elif original <= slow * 2 * math.pi:
        yield (
            f"[original_max_position_embeddings] with [yarn_beta_slow]: even the shortest wave, of 2 π "
            f"tokens, turns less than {slow:g} times. Use an original length of "
            f"{math.floor(slow * 2 * math.pi) + 1} or more, or a smaller --yarn-beta-slow."
        )


def _model(names: list[str] | tuple[str, ...]) -> list[str]:
    return [f"model.{name}" for name in names]


POSITION_RULES = (positions, rotary, original_length)
