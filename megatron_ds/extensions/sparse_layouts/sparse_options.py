"""`SparseOptions`: the part of `ModelConfig` that chooses a sparse layout of attention, as DeepSpeed's JSON
block "sparse_attention" does."""

from dataclasses import dataclass, fields

from ...config.options.need import Need, need
from ...config.options.option import option

MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local")
UNI = "unidirectional"
BI = "bidirectional"
BLOCK = "sparse_attention."


# Mode → the options that it has, besides the size of a block and the direction.
OF_MODE = {
    "dense": (),
    "fixed": (
        "layout_per_head",
        "num_local_blocks",
        "num_global_blocks",
        "num_different_global_patterns",
        "horizontal_global_attention",
    ),
    "variable": (
        "layout_per_head",
        "num_random_blocks",
        "local_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
        "horizontal_global_attention",
    ),
    "bigbird": (
        "layout_per_head",
        "num_random_blocks",
        "num_sliding_window_blocks",
        "num_global_blocks",
    ),
    "bslongformer": (
        "layout_per_head",
        "num_sliding_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
    ),
    "local": ("num_sliding_window_blocks",),
}


def _modes_with(name: str) -> Need:
    modes = [mode for mode, names in OF_MODE.items() if name in names]
    return need("model.sparse_attention", *modes)


@dataclass(frozen=True)
class SparseOptions:
    """A mode and its numbers, in blocks of tokens. Without a mode attention is not sparse."""

    sparse_attention: str | None = option(
        None,
        choices=MODES,
        json=f"{BLOCK}mode",
        values={"local_sliding_window": "local"},
        help="Blocks of tokens attend to some of the blocks. fixed: windows that do not overlap, and the "
        "last blocks of each window (Child et al. 2019); variable: windows of several sizes, and given "
        "blocks; bigbird: a sliding window, the first blocks, and random ones (Zaheer et al. 2020); "
        "bslongformer: a sliding window, and given blocks (Beltagy et al. 2020); local: a sliding "
        "window; dense: all.",
        avoid="Below some thousand tokens it saves little; dropout of attention excludes its kernels.",
    )
    sparse_block: int = option(
        16,
        at_least=1,
        json=f"{BLOCK}block",
        unit="tokens",
        needs=need("model.sparse_attention"),
        help="Tokens of a block.",
        avoid="On GPUs blocks are computed in tiles of 128, so smaller ones save less. Not measured yet.",
    )
    sparse_direction: str | None = option(
        None,
        choices=(UNI, BI),
        json=f"{BLOCK}attention",
        needs=need("model.sparse_attention"),
        help="Whether tokens attend to later ones. Default: as the model does.",
    )
    sparse_layout_per_head: bool = option(
        False,
        json=f"{BLOCK}different_layout_per_head",
        needs=_modes_with("layout_per_head"),
        help="Draw random blocks, or choose a pattern of global blocks, for each head separately.",
    )
    sparse_num_local_blocks: int = option(
        4,
        at_least=1,
        json=f"{BLOCK}num_local_blocks",
        needs=_modes_with("num_local_blocks"),
        help="Blocks of a window (fixed).",
    )
    sparse_num_global_blocks: int = option(
        1,
        at_least=1,
        json=f"{BLOCK}num_global_blocks",
        needs=_modes_with("num_global_blocks"),
        help="Blocks of each window that all tokens see (fixed), or first blocks that do (bigbird).",
    )
    sparse_num_different_global_patterns: int = option(
        1,
        at_least=1,
        json=f"{BLOCK}num_different_global_patterns",
        needs=_modes_with("num_different_global_patterns"),
        help="Heads take turns in which blocks of a window are global (fixed).",
    )
    sparse_horizontal_global_attention: bool = option(
        False,
        json=f"{BLOCK}horizontal_global_attention",
        needs=_modes_with("horizontal_global_attention"),
        help="Global blocks see all blocks, too (fixed, variable).",
    )
    sparse_num_random_blocks: int = option(
        0,
        at_least=0,
        json=f"{BLOCK}num_random_blocks",
        needs=_modes_with("num_random_blocks"),
        help="Random blocks that each block sees (variable, bigbird), functions of the seed and the layer.",
    )
    sparse_local_window_blocks: tuple[int, ...] = option(
        (4,),
        at_least=1,
        json=f"{BLOCK}local_window_blocks",
        needs=_modes_with("local_window_blocks"),
        help="Blocks of each window, the last number for all others, too (variable).",
    )
    sparse_global_block_indices: tuple[int, ...] = option(
        (0,),
        at_least=0,
        json=f"{BLOCK}global_block_indices",
        needs=_modes_with("global_block_indices"),
        help="Numbers of the global blocks, or of the first of each run (variable, bslongformer).",
    )
    sparse_global_block_end_indices: tuple[int, ...] | None = option(
        None,
        at_least=1,
        json=f"{BLOCK}global_block_end_indices",
        needs=_modes_with("global_block_end_indices"),
        help="Where each run of global blocks ends, exclusive (variable, bslongformer). Default: single "
        "blocks.",
    )
    sparse_num_sliding_window_blocks: int = option(
        3,
        at_least=1,
        json=f"{BLOCK}num_sliding_window_blocks",
        needs=_modes_with("num_sliding_window_blocks"),
        help="Blocks of a sliding window, half of them before and half after a block (bigbird, "
        "bslongformer, local).",
    )


SPARSE_FIELDS = tuple(field.name for field in fields(SparseOptions))
