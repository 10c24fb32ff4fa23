"""Dropout whose mask is a pure function of (seed, site, sample, position, channel).

A mask is a table of 16-bit random numbers, row by row; an element is kept when its number is below a threshold. Any slice of
rows can be drawn by itself, so a rank that holds a slice of the sequence, a micro-batch of another size, a recomputed forward
and a resumed run all see the same mask, and no generator's state is ever saved. There is no global generator.

    CPU      Philox 4x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): keyed by (seed, site, sample),
             row r starts at counter r * ceil(cols / 16), each counter giving sixteen numbers
    others   the device's own generator, seeded afresh for each block of ROWS_PER_BLOCK rows

The two differ, so a mask belongs to a kind of device. Where only some tokens of a sequence are present, their masks are picked
from the whole table: a token keeps the mask that it has among all.
"""

import numpy as np
import torch

from .random import generator_of, seed_of
from .workspace import has_memory

LEVELS = 1 << 16             # values of a random number; so drop probabilities are multiples of 1 / LEVELS
NUMBERS_PER_COUNTER = 16     # 4 words of 64 bits
ROWS_PER_BLOCK = 64


def dropout(x: torch.Tensor, p: float, *, seed: int, site: str, sample_ids: tuple[int, ...], rows: range,
            picked: torch.Tensor | None = None) -> torch.Tensor:
    """Zero elements with probability `p`, scale the others so that the mean stays.

    x [s, b, h]; `rows` the s positions it holds of each sequence; `sample_ids` the b samples it holds; `site` names the place
    in the model. p = 0 returns x itself. In evaluation, pass 0.
    picked   int64 [b, s]: of each sample x holds only these of the `rows`, counted from their first
    """
    if p == 0.0:
        return x
    s, b, h = x.shape
    held = len(rows) if picked is None else picked.shape[1]
    assert len(sample_ids) == b and held == s, f"x is {list(x.shape)}, got {len(sample_ids)} samples, {held} rows"
    mask = torch.empty(s, b, h, dtype=torch.bool, device=x.device)
    for i, sample in enumerate(sample_ids):
        key = seed, site, int(sample)
        if picked is None:
            draw_keep_mask_(mask[:, i], p, key, rows)
        else:
            mask[:, i] = keep_mask(p, key, rows, h, device=x.device)[picked[i]]
    return apply_mask(x, mask, p)


def keep_mask(p: float, key: tuple[int | str, ...], rows: range, cols: int, *,
              device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [len(rows), cols], True = keep: these rows of the key's table. `cols` is the table's full width."""
    mask = torch.empty(len(rows), cols, dtype=torch.bool, device=device)
    draw_keep_mask_(mask, p, key, rows)
    return mask


def attention_keep_mask(p: float, *, seed: int, site: str, sample_ids: tuple[int, ...], heads: range, rows: range,
                        cols: int, picked: torch.Tensor | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [b, n, sq, sk] for attention probabilities: `heads` are global head numbers, `rows` query positions.

    picked   int64 [b, k]: of each sample only these of the `rows`, counted from their first, and of the columns: [b, n, k, k]
    """
    shape = (len(rows), cols) if picked is None else (picked.shape[1], picked.shape[1])
    mask = torch.empty(len(sample_ids), len(heads), *shape, dtype=torch.bool, device=device)
    for i, sample in enumerate(sample_ids):
        for j, head in enumerate(heads):
            key = seed, site, int(sample), head
            if picked is None:
                draw_keep_mask_(mask[i, j], p, key, rows)
            else:
                mask[i, j] = keep_mask(p, key, rows, cols, device=device)[picked[i][:, None], picked[i]]
    return mask


def draw_keep_mask_(out: torch.Tensor, p: float, key: tuple[int | str, ...], rows: range) -> None:
    """Fill `out`, bool [len(rows), cols] of any strides, with these rows of the key's table. Does nothing to a
    tensor without memory."""
    if not has_memory(out):
        return
    if out.device.type == "cpu":
        _draw_philox(out, _threshold(p), seed_of(*key), rows)
    else:
        _draw_blocks(out, _threshold(p), key, rows)


def keep_scale(p: float) -> float:
    """What kept elements are multiplied by: one over the true probability of keeping, which is a multiple of 1 / LEVELS."""
    return LEVELS / _threshold(p)


def apply_mask(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """x where `mask`, scaled by `keep_scale(p)`; else 0. Keeps one byte an element for backward."""
    return _Masked.apply(x, mask.view(torch.uint8), keep_scale(p))


class _Masked(torch.autograd.Function):
    # Multiplying by uint8 is several times as fast on CPU as by bool or torch.where.

    @staticmethod
    def forward(ctx, x, mask, scale):
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x.mul(mask).mul_(scale)

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad.mul(mask).mul_(ctx.scale), None, None


def _threshold(p: float) -> int:
    assert 0.0 <= p < 1.0, f"a drop probability must be in [0, 1), got {p}"
    return max(1, round((1.0 - p) * LEVELS))


def _draw_philox(out: torch.Tensor, threshold: int, seed: int, rows: range) -> None:
    cols = out.shape[1]
    per_row = -(-cols // NUMBERS_PER_COUNTER)
    words = np.random.Philox(key=seed, counter=rows.start * per_row).random_raw(len(rows) * per_row * 4)
    numbers = words.view(np.uint16).reshape(len(rows), per_row * NUMBERS_PER_COUNTER)[:, :cols]
    if threshold == LEVELS:
        out.fill_(True)
    else:
        np.less(numbers, np.uint16(threshold), out=out.numpy())


def _draw_blocks(out: torch.Tensor, threshold: int, key: tuple[int | str, ...], rows: range) -> None:
    for block in range(rows.start // ROWS_PER_BLOCK, -(-rows.stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        start, stop = max(rows.start, first), min(rows.stop, first + ROWS_PER_BLOCK)
        numbers = torch.empty(ROWS_PER_BLOCK, out.shape[1], dtype=torch.int32, device=out.device)
        numbers.random_(0, LEVELS, generator=generator_of(*key, block, device=out.device))
        torch.lt(numbers[start - first:stop - first], threshold, out=out[start - rows.start:stop - rows.start])
