"""Rules about sparse layouts of attention."""

from collections.abc import Iterator

from ...config.messages import divisors, either, flag, neighbours
from ...config.run import RunConfig
from .sparse_options import BI, UNI


def sparse_shapes(config: RunConfig) -> Iterator[str]:
    """Blocks divide the sequence; windows, global blocks and patterns fit into each other."""
    model = config.model
    mode = config.model.sparse_attention
    if mode is None:
        return
    if model.seq_length and model.seq_length % model.sparse_block:
        yield (
            f"[seq_length] is not a multiple of [sparse_block]: sequences consist of whole blocks. Use "
            f"--seq-length {neighbours(model.seq_length, model.sparse_block)}, or --sparse-block "
            f"{either(divisors(model.seq_length)[-6:])}."
        )
    if mode == "fixed":
        yield from _fixed(config)
    if mode in ("variable", "bslongformer"):
        yield from _global_runs(config)


def _fixed(config: RunConfig) -> Iterator[str]:
    model = config.model
    size = model.sparse_num_local_blocks
    shared = model.sparse_num_global_blocks
    turns = model.sparse_num_different_global_patterns
    if size % shared:
        yield (
            "[sparse_num_local_blocks] is not a multiple of [sparse_num_global_blocks]: the global blocks "
            f"are an equal part of each window. Use {flag('model.sparse_num_global_blocks')} "
            f"{either(divisors(size))}."
        )
        return
    if turns > 1 and not model.sparse_layout_per_head:
        yield (
            "[sparse_num_different_global_patterns] gives heads different layouts, but all heads have the "
            "same. Add --sparse-layout-per-head, or remove it."
        )
    if turns > size // shared:
        yield (
            f"[sparse_num_different_global_patterns] is more than the {size // shared} places of global "
            f"blocks in a window. Use {either(range(1, size // shared + 1))}."
        )


def _global_runs(config: RunConfig) -> Iterator[str]:
    model = config.model
    starts = model.sparse_global_block_indices
    ends = model.sparse_global_block_end_indices
    if ends is not None and len(ends) != len(starts):
        yield (
            f"[sparse_global_block_end_indices] has {len(ends)} ends for the {len(starts)} starts of "
            "[sparse_global_block_indices]. Give as many."
        )
    elif ends is not None and any(start >= end for start, end in zip(starts, ends)):
        yield (
            "[sparse_global_block_end_indices]: a run ends at or before its start in "
            "[sparse_global_block_indices]. Ends are exclusive: a single block n is from n to n + 1."
        )
    blocks = (model.seq_length or 0) // model.sparse_block
    if blocks and max(starts) >= blocks:
        yield (
            f"[sparse_global_block_indices]: the {blocks} blocks of a sequence have the numbers 0 to "
            f"{blocks - 1}. Remove {max(starts)}."
        )


def sparse_direction(config: RunConfig) -> Iterator[str]:
    """A layout sees later tokens where the model does."""
    model = config.model
    if model.sparse_attention is None:
        return
    wanted = BI if model.model == "bert" else UNI
    if model.sparse_direction not in (None, wanted):
        why = (
            "a causal model sees no later tokens"
            if wanted == UNI
            else "BERT predicts a token from earlier and later ones"
        )
        yield f"[sparse_direction], but {why}. Use {wanted}, or remove it."
    if model.sparse_horizontal_global_attention and wanted == UNI:
        yield (
            "[sparse_horizontal_global_attention] shows later tokens to global blocks, which a causal "
            "model may not see. Remove it."
        )


def sparse_composition(config: RunConfig) -> Iterator[str]:
    """One option chooses the keys."""
    if config.model.sparse_attention is None:
        return
    if config.model.window_size is not None:
        yield "[sparse_attention] and [window_size] both choose the keys that a token sees. Give only one."
