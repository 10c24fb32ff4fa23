"""Dropout whose mask is a pure function of (seed, site, sample, position, channel).

The same key, for example (seed, "decoder.layers.3.mlp", sample 17), gives the same mask under every layout,
in a recomputed forward, and after a resume.

A mask is a slice of a table of random numbers (keep_tables.py), whose rows are positions, keyed by (seed,
site, sample) or (seed, site, sample, head).

Implementations, of the same bits, so that a run on a GPU drops what the same run on a CPU drops: torch's
operations draw a mask and keep it for backward; kernels for GPUs draw it inside the
dropout, and once more inside its backward.

Where only some tokens of a sequence are present, their masks are selected from the whole table, so a token's
mask does not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .keep_tables import (
    draw_keep_masks_,
    keep_masks,
    keep_scale,
)
from .kernel_table import Operation, random_tensors
from .keyed_random import Key


@dataclass(frozen=True)
class KeepMask:
    """Which attention probabilities [b, n, sq, sk] are kept; drawn when it is asked for.

    p       the probability to be dropped
    keys    of the b samples, from `sample_keys`
    heads   global numbers of the n heads
    rows    query positions; `cols` key positions
    picked  int64 [b, k]: only these rows (counted from the first) and columns of each sample; [b, n, k, k]
    seen    only these of the key positions; None: all
    """

    p: float
    keys: Sequence[Key]
    heads: range
    rows: range
    cols: int
    picked: torch.Tensor | None = None
    device: torch.device | str = "cpu"
    seen: slice | None = None

    @property
    def mask(self) -> torch.Tensor:
        """bool [b, n, sq, sk], drawn anew by each call; contiguous, unless only some keys are `seen`."""
        queries, columns = (
            (len(self.rows), self.cols)
            if self.picked is None
            else 2 * self.picked.shape[1:]
        )
        out = torch.empty(
            len(self.keys),
            len(self.heads),
            queries,
            columns,
            dtype=torch.bool,
            device=self.device,
        )
        fill_attention_mask_(
            out, self.p, self.of_heads, self.rows, self.cols, self.picked
        )
        return out if self.seen is None else out[..., self.seen]

    @property
    def of_heads(self) -> list[Key]:
        """The keys of the tables, b n of them: one for each head of each sample."""
        return [(*key, head) for key in self.keys for head in self.heads]


@Operation
def dropout(
    x: torch.Tensor,
    p: float,
    seed: int,
    site: str,
    sample_ids: tuple[int, ...],
    rows: range,
    picked: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zero elements of x [s, b, h] with probability `p` and scale the others so that the mean stays.

    rows        the s positions that x holds of each sequence
    sample_ids  the b samples that x holds
    site        the place in the model, part of the key
    picked      int64 [b, s]: of each sample x holds only these of the `rows`, counted from their first

    p = 0 returns x itself; pass 0 in evaluation.
    """
    if p == 0.0:
        return x
    return apply_mask(
        x, _hidden_mask(x, p, sample_keys(seed, site, sample_ids), rows, picked), p
    )


@Operation
def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    seed: int,
    site: str,
    sample_ids: tuple[int, ...],
    rows: range,
    picked: torch.Tensor | None = None,
) -> torch.Tensor:
    """`residual` + dropout(x), both [s, b, h] of one dtype; see `dropout`."""
    if p == 0.0:
        return residual + x
    return apply_mask(
        x,
        _hidden_mask(x, p, sample_keys(seed, site, sample_ids), rows, picked),
        p,
        residual,
    )


@dropout.example
def _dropout_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    (x,) = random_tensors(dtype, device, (rows, 2, width))
    return x, 0.3, 1, "here", (4, 7), range(3, 3 + rows)


@dropout_add.example
def _dropout_add_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    x, residual = random_tensors(dtype, device, (rows, 2, width), (rows, 2, width))
    return x, residual, 0.3, 1, "here", (4, 7), range(3, 3 + rows)


def _hidden_mask(
    x: torch.Tensor,
    p: float,
    keys: Sequence[Key],
    rows: range,
    picked: torch.Tensor | None,
) -> torch.Tensor:
    return hidden_mask(x.shape, p, keys, rows, picked, x.device)


def hidden_mask(
    shape: Sequence[int],
    p: float,
    keys: Sequence[Key],
    rows: range,
    picked: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """bool [s, b, h], contiguous: where `dropout` keeps a tensor of this shape. keys: of the b samples."""
    s, b, h = shape
    check_held(shape, keys, rows, picked)
    if picked is None:
        mask = torch.empty(s, b, h, dtype=torch.bool, device=device)
        draw_keep_masks_(mask.transpose(0, 1), p, keys, rows)
        return mask
    whole = keep_masks(p, keys, rows, h, device=device)  # [b, rows, h]
    return (
        whole.gather(1, picked[:, :, None].expand(-1, -1, h))
        .transpose(0, 1)
        .contiguous()
    )


def check_held(
    shape: Sequence[int], samples: Sequence, rows: range, picked: torch.Tensor | None
) -> None:
    """Fail where x is not of these samples and rows."""
    held = len(rows) if picked is None else picked.shape[1]
    assert (held, len(samples)) == tuple(shape[:2]), (
        f"x is {list(shape)}, got {len(samples)} samples, {held} rows"
    )


def sample_keys(seed: int, site: str, sample_ids: Sequence[int]) -> list[Key]:
    """Return the key of each sample at a place in the model."""
    return [(seed, site, int(sample)) for sample in sample_ids]


@Operation
def fill_attention_mask_(
    out: torch.Tensor,
    p: float,
    keys: Sequence[Key],
    rows: range,
    cols: int,
    picked: torch.Tensor | None = None,
) -> None:
    """Fill `out`, bool [b, n, sq, sk], with the tables of b n keys; see `KeepMask`."""
    if picked is None:
        return draw_keep_masks_(out.view(len(keys), len(rows), cols), p, keys, rows)
    heads = out.shape[1]
    masks = keep_masks(p, keys, rows, cols, device=out.device).unflatten(0, (-1, heads))
    masks = masks.gather(2, picked[:, None, :, None].expand(-1, heads, -1, cols))
    torch.gather(
        masks,
        3,
        picked[:, None, None, :].expand(-1, heads, picked.shape[1], -1),
        out=out,
    )


fill_attention_mask_.benchmark_sizes = ((4096, 4096),)  # queries, keys


@fill_attention_mask_.example
def _attention_mask_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    keep = KeepMask(
        0.3, sample_keys(1, "here", (4, 7)), range(2, 5), range(6, 6 + rows), width
    )
    out = torch.zeros(2, 3, rows, width, dtype=torch.bool, device=device)
    return out, keep.p, keep.of_heads, keep.rows, keep.cols


def apply_mask(
    x: torch.Tensor, mask: torch.Tensor, p: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x where `mask`, scaled by `keep_scale(p)`; else 0; plus `residual`. Keeps one byte an element for
    backward."""
    return _Masked.apply(x, mask.view(torch.uint8), keep_scale(p), residual)


class _Masked(torch.autograd.Function):
    # Multiplying by uint8 is several times as fast on CPU as by bool or torch.where.

    @staticmethod
    def forward(ctx, x, mask, scale, residual):
        ctx.save_for_backward(mask)
        ctx.scale = scale
        y = x.mul(mask).mul_(scale)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return (
            grad.mul(mask).mul_(ctx.scale),
            None,
            None,
            grad if ctx.needs_input_grad[3] else None,
        )
