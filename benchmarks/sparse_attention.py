"""Time of attention by blocks against the share of blocks that a layout sees.

    python benchmarks/sparse_attention.py                           # 8,192 tokens, forward and backward
    python benchmarks/sparse_attention.py --dtype bf16 --blocks 16
    python benchmarks/sparse_attention.py --tokens 2048 --repeats 2

The ideal of a layout is the time of attention to all tokens, in the same dtype, times the layout's density:
the share of the scores of all tokens that it sees. That time is the shorter one of two: of the dense layout,
by the kernel of layouts, and of attention without a layout, by the kernel that a run without sparse attention
takes. Turns alternate between the layouts; the time is the CPU time of the process (with OMP_NUM_THREADS=1
that of a core), the shortest and the median of all turns. Gradients are returned, not added to those of an
earlier turn. Freed memory is kept, as in training.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.extensions.sparse_layouts.sparse_layouts import block_layout
from megatron_ds.extensions.sparse_layouts.sparse_options import SparseOptions
from megatron_ds.host.allocator import set_allocator
from megatron_ds.ops.attention_pattern import AttentionPattern
from megatron_ds.ops.core_attention import attention
from megatron_ds.ops.key_visibility import KeyVisibility

# Name in the table → options without their prefix, for blocks of 16 tokens.
LAYOUTS = {
    "fixed, 64 local, 16 global": dict(
        mode="fixed", num_local_blocks=64, num_global_blocks=16
    ),
    "fixed, 16 local, 2 global": dict(
        mode="fixed", num_local_blocks=16, num_global_blocks=2
    ),
    "bigbird, 65 sliding, 1 random": dict(
        mode="bigbird", num_sliding_window_blocks=65, num_random_blocks=1
    ),
    "bslongformer, 65 sliding": dict(mode="bslongformer", num_sliding_window_blocks=65),
    "local, 129 sliding": dict(mode="local", num_sliding_window_blocks=129),
    "local, 33 sliding": dict(mode="local", num_sliding_window_blocks=33),
    "fixed, 4 local, 1 global": dict(
        mode="fixed", num_local_blocks=4, num_global_blocks=1
    ),
    "variable, 64 local, 2 random": dict(
        mode="variable", local_window_blocks=(64,), num_random_blocks=2
    ),
    "bigbird, 9 sliding, 16 random": dict(
        mode="bigbird", num_sliding_window_blocks=9, num_random_blocks=16
    ),
    "bigbird, 3 sliding, 1 random": dict(
        mode="bigbird", num_sliding_window_blocks=3, num_random_blocks=1
    ),
}
PLAIN = "without a layout"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options(mode: str, block: int, **more: int | tuple[int, ...]) -> SparseOptions:
    """The options of a layout."""
    return SparseOptions(
        mode, block, **{f"sparse_{name}": value for name, value in more.items()}
    )


def scaled(
    value: str | int | tuple[int, ...], block: int
) -> str | int | tuple[int, ...]:
    """A number of blocks of 16 tokens, in blocks of other sizes; at least one. A mode stays."""
    if isinstance(value, tuple):
        return tuple(scaled(count, block) for count in value)
    return value if isinstance(value, str) else max(1, value * 16 // block)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--bidirectional", action="store_true")
    args = parser.parse_args()
    set_allocator(keep_freed=True)
    for block in args.blocks:
        measure(args, block)


def measure(args: argparse.Namespace, block: int) -> None:
    """Prints the table of one size of blocks."""
    causal = not args.bidirectional
    s = args.tokens
    # Queries, keys and values.
    draw = torch.Generator().manual_seed(0)
    shape = s, 1, args.heads, args.channels
    tensors = [
        torch.randn(shape, generator=draw).to(DTYPES[args.dtype]).requires_grad_()
        for _ in range(3)
    ]
    patterns = {"dense": pattern_of(options("dense", block), s, args.heads, causal)}
    for name, more in LAYOUTS.items():
        chosen = {key: scaled(value, block) for key, value in more.items()}
        patterns[name] = pattern_of(
            options(block=block, **chosen), s, args.heads, causal
        )
    # A turn for each layout, and one without.
    turns: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda pattern=pattern: attention(
            *tensors, visible=KeyVisibility(pattern)
        )
        for name, pattern in (patterns | {PLAIN: AttentionPattern(causal)}).items()
    }
    # Turns alternate, so that all contestants meet the same load.
    dout = torch.ones(s, 1, args.heads * args.channels, dtype=DTYPES[args.dtype])
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(args.repeats):
        for name, turn in turns.items():
            times[name].append(seconds(turn, tensors, dout))
    # The time of all tokens is the shorter one of the two.
    best = {name: min(of_turns) for name, of_turns in times.items()}
    whole = min(best["dense"], best[PLAIN])
    print(
        f"{s} tokens, {args.dtype}, blocks of {block}, {args.heads} heads of {args.channels}, "
        f"{'causal' if causal else 'bidirectional'}, {torch.get_num_threads()} threads; {PLAIN} "
        f"{best[PLAIN]:.3f} s, median {statistics.median(times[PLAIN]):.3f} s"
    )
    print(
        f"{'layout':<32}{'density':>9}{'seconds':>9}{'median':>9}{'of all':>9}{'of ideal':>10}"
    )
    # A row for each layout.
    for name, pattern in patterns.items():
        density = pattern.pairs(s) / patterns["dense"].pairs(s)
        share = best[name] / whole
        print(
            f"{name:<32}{density:9.3f}{best[name]:9.3f}{statistics.median(times[name]):9.3f}{share:9.3f}"
            f"{density / share:10.2f}"
        )


def pattern_of(
    chosen: SparseOptions, s: int, heads: int, causal: bool
) -> AttentionPattern:
    """The pattern of a layout."""
    return AttentionPattern(causal, layout=block_layout(chosen, s, heads, causal, 1))


def seconds(
    turn: Callable[[], torch.Tensor], tensors: list[torch.Tensor], dout: torch.Tensor
) -> float:
    """CPU time of one forward and backward."""
    start = time.process_time()
    torch.autograd.grad(turn(), tensors, dout)
    return time.process_time() - start


if __name__ == "__main__":
    main()
