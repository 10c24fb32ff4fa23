"""Run a script with fused attention for CPUs, torch's and the compiled one, replaced by functions that
compute no scores.

    python benchmarks/without_scores.py pretrain_gpt.py … flags

Results and gradients have the shapes, strides and memory of those of the kernels, and every page of them is
written: a run has the resident memory of training on long sequences and a small part of its time, which
scores take. The workspace of the kernels, a few MiB a thread, is missing. For measurements of memory:
`longest_sequence.py` and `train_step.py` have a flag `--without-scores`.
"""

import argparse
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ds.extensions.kernels.cpu import compiled_attention  # noqa: E402


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [b, n, s, d], key and value [b, g, k, d] → (out [b, n, s, d], log-sum-exp fp32 [b, n, s])."""
    b, n, s, d = query.shape
    out = query.new_empty(b, s, n, d)
    sums = query.new_zeros(b, s, n, dtype=torch.float32)
    shared = min(s, value.shape[2])
    out.zero_()
    out[:, :shared].unflatten(2, (value.shape[1], -1)).copy_(
        value[:, :, :shared].permute(0, 2, 1, 3).unsqueeze(3)
    )
    return out.transpose(1, 2), sums.transpose(1, 2)


def backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros of the shapes of query, key and value."""
    return tuple(
        t.new_empty(t.transpose(1, 2).shape).zero_().transpose(1, 2)
        for t in (query, key, value)
    )


def write_results(
    name: str, tensors: Sequence[torch.Tensor], of_rows: Sequence[torch.Tensor], *_: Any
) -> None:
    """Zeros in place of what compiled attention computes: output and a number a row, or three gradients."""
    for t in (tensors[-1], *of_rows) if name == "forward" else tensors[-3:]:
        t.zero_()


def replace_kernels() -> torch.library.Library:
    """In this process, as long as the result is referenced."""
    compiled_attention._run = write_results
    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        kernels.impl("_scaled_dot_product_flash_attention_for_cpu", forward, "CPU")
        kernels.impl(
            "_scaled_dot_product_flash_attention_for_cpu_backward", backward, "CPU"
        )
    return kernels


def main() -> None:
    """Replace the kernels, then run the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", help="its path")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    kernels = replace_kernels()
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    del kernels


if __name__ == "__main__":
    main()
