"""Dropout whose mask is a pure function of (seed, site, sample, position, channel).

The same key, for example (seed, "decoder.layers.3.mlp", sample 17), gives the same mask under every layout,
in a recomputed forward, and after a resume.

A mask is a table of 16-bit random numbers, row by row; an element is kept when its number is below a
threshold. Any slice of rows can be drawn alone, so a rank that holds a slice of the sequence and a
micro-batch of another size use the same mask.

The numbers come from Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by (seed, site, sample) or (seed, site, sample, head). Row r starts at counter 1 + r * ceil(cols / 16);
each counter gives sixteen numbers.

Implementations, of the same bits, so that a run on a GPU drops what the same run on a CPU drops: CPUs draw
with NumPy, one table after another; kernels for GPUs (gpu/dropout_kernels.py) draw inside the dropout and
once more inside its backward, so no mask is kept; elsewhere all tables are computed in one sequence of
elementwise operations on int64.

Where only some tokens of a sequence are present, their masks are selected from the whole table, so a token's
mask does not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .gpu import dropout_kernels
from .kernel_table import CPU, FLOATS, GPU, Operation, random_tensors
from .keyed_random import Key, seed_of, shift_right
from .product import has_memory

LEVELS = 1 << 16             # values of a random number; so drop probabilities are multiples of 1 / LEVELS
NUMBERS_PER_COUNTER = 16     # 4 words of 64 bits
ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)       # Salmon et al. 2011, table 2
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)         # of the key from round to round
COUNTERS_AT_ONCE = 1 << 22   # limits working memory on a device: a few int64 tensors of this size


@dataclass(frozen=True)
class KeepMask:
    """Which attention probabilities [b, n, sq, sk] are kept; drawn when it is asked for.

    p       the probability to be dropped
    keys    of the b samples, from `sample_keys`
    heads   global numbers of the n heads
    rows    query positions; `cols` key positions
    picked  int64 [b, k]: only these rows (counted from the first) and columns of each sample; [b, n, k, k]
    """

    p: float
    keys: Sequence[Key]
    heads: range
    rows: range
    cols: int
    picked: torch.Tensor | None = None
    device: torch.device | str = "cpu"

    @property
    def mask(self) -> torch.Tensor:
        """bool [b, n, sq, sk], contiguous, drawn anew by each call."""
        queries, columns = (len(self.rows), self.cols) if self.picked is None else 2 * self.picked.shape[1:]
        out = torch.empty(len(self.keys), len(self.heads), queries, columns, dtype=torch.bool,
                          device=self.device)
        fill_attention_mask_(out, self.p, self.of_heads, self.rows, self.cols, self.picked)
        return out

    @property
    def threshold(self) -> int:
        """An element is kept where its number is below this."""
        return _threshold(self.p)

    @property
    def of_heads(self) -> list[Key]:
        """The keys of the tables, b n of them: one for each head of each sample."""
        return [(*key, head) for key in self.keys for head in self.heads]


@Operation
def dropout(x: torch.Tensor, p: float, seed: int, site: str, sample_ids: tuple[int, ...], rows: range,
            picked: torch.Tensor | None = None) -> torch.Tensor:
    """Zero elements of x [s, b, h] with probability `p` and scale the others so that the mean stays.

    rows        the s positions that x holds of each sequence
    sample_ids  the b samples that x holds
    site        the place in the model, part of the key
    picked      int64 [b, s]: of each sample x holds only these of the `rows`, counted from their first

    p = 0 returns x itself; pass 0 in evaluation.
    """
    if p == 0.0:
        return x
    return apply_mask(x, _hidden_mask(x, p, sample_keys(seed, site, sample_ids), rows, picked), p)


@Operation
def dropout_add(x: torch.Tensor, residual: torch.Tensor, p: float, seed: int, site: str,
                sample_ids: tuple[int, ...], rows: range, picked: torch.Tensor | None = None) -> torch.Tensor:
    """`residual` + dropout(x), both [s, b, h] of one dtype; see `dropout`."""
    if p == 0.0:
        return residual + x
    return apply_mask(x, _hidden_mask(x, p, sample_keys(seed, site, sample_ids), rows, picked), p, residual)


@dropout.example
def _dropout_example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    (x,) = random_tensors(dtype, device, (rows, 2, width))
    return x, 0.3, 1, "here", (4, 7), range(3, 3 + rows)


@dropout_add.example
def _dropout_add_example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    x, residual = random_tensors(dtype, device, (rows, 2, width), (rows, 2, width))
    return x, residual, 0.3, 1, "here", (4, 7), range(3, 3 + rows)


@dropout.implementation("cuda", devices=GPU, dtypes=FLOATS)
def _dropout_on_gpu(x: torch.Tensor, p: float, *table: Any, **named: Any) -> torch.Tensor:
    return _with_kernel(x, None, p, *table, **named) if p else x


@dropout_add.implementation("cuda", devices=GPU, dtypes=FLOATS)
def _dropout_add_on_gpu(x: torch.Tensor, residual: torch.Tensor, p: float, *table: Any,
                        **named: Any) -> torch.Tensor:
    return _with_kernel(x, residual, p, *table, **named) if p else residual + x


def _with_kernel(x: torch.Tensor, residual: torch.Tensor | None, p: float, seed: int, site: str,
                 sample_ids: tuple[int, ...], rows: range,
                 picked: torch.Tensor | None = None) -> torch.Tensor:
    _check_held(x, sample_ids, rows, picked)
    seeds = [seed_of(*key) for key in sample_keys(seed, site, sample_ids)]
    return dropout_kernels.dropout(x, residual, seeds=seeds, threshold=_threshold(p), first_row=rows.start,
                                   picked=picked)


def _hidden_mask(x: torch.Tensor, p: float, keys: Sequence[Key], rows: range,
                 picked: torch.Tensor | None) -> torch.Tensor:
    """bool [s, b, h], contiguous."""
    _check_held(x, keys, rows, picked)
    s, b, h = x.shape
    if picked is None:
        mask = torch.empty(s, b, h, dtype=torch.bool, device=x.device)
        draw_keep_masks_(mask.transpose(0, 1), p, keys, rows)
        return mask
    whole = keep_masks(p, keys, rows, h, device=x.device)                                # [b, rows, h]
    return whole.gather(1, picked[:, :, None].expand(-1, -1, h)).transpose(0, 1).contiguous()


def _check_held(x: torch.Tensor, samples: Sequence, rows: range, picked: torch.Tensor | None) -> None:
    held = len(rows) if picked is None else picked.shape[1]
    assert (held, len(samples)) == x.shape[:2], (
        f"x is {list(x.shape)}, got {len(samples)} samples, {held} rows")


def keep_masks(p: float, keys: Sequence[Key], rows: range, cols: int, *,
               device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [len(keys), len(rows), cols], True = keep: these rows of each key's table, of full width."""
    masks = torch.empty(len(keys), len(rows), cols, dtype=torch.bool, device=device)
    draw_keep_masks_(masks, p, keys, rows)
    return masks


def sample_keys(seed: int, site: str, sample_ids: Sequence[int]) -> list[Key]:
    """The key of each sample at a place in the model."""
    return [(seed, site, int(sample)) for sample in sample_ids]


@Operation
def fill_attention_mask_(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range, cols: int,
                         picked: torch.Tensor | None = None) -> None:
    """Fill `out`, bool [b, n, sq, sk], with the tables of b n keys; see `KeepMask`."""
    if picked is None:
        return draw_keep_masks_(out.view(len(keys), len(rows), cols), p, keys, rows)
    heads = out.shape[1]
    masks = keep_masks(p, keys, rows, cols, device=out.device).unflatten(0, (-1, heads))
    masks = masks.gather(2, picked[:, None, :, None].expand(-1, heads, -1, cols))
    torch.gather(masks, 3, picked[:, None, None, :].expand(-1, heads, picked.shape[1], -1), out=out)


@fill_attention_mask_.example
def _attention_mask_example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    keep = KeepMask(0.3, sample_keys(1, "here", (4, 7)), range(2, 5), range(6, 6 + rows), width)
    out = torch.zeros(2, 3, rows, width, dtype=torch.bool, device=device)
    return out, keep.p, keep.of_heads, keep.rows, keep.cols


def _takes_mask(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range, cols: int,
                picked: torch.Tensor | None = None) -> str:
    return dropout_kernels.masks_fit(out, cols, picked)


@fill_attention_mask_.implementation("cuda", devices=GPU, fits=_takes_mask)
def _attention_mask_on_gpu(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range, cols: int,
                           picked: torch.Tensor | None = None) -> None:
    if has_memory(out):
        seeds = seeds_on(out.device, keys).view(out.shape[:2])
        dropout_kernels.fill_keep_masks_(out, seeds, threshold=_threshold(p), first_row=rows.start, cols=cols,
                                         picked=picked)


@Operation
def draw_keep_masks_(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range) -> None:
    """Fill `out`, bool [len(keys), len(rows), cols] of any strides, with these rows of each key's table.

    A tensor without memory stays as it is.
    """
    if has_memory(out) and out.numel():
        draw_on_device_(out, _threshold(p), keys, rows)


@draw_keep_masks_.example
def _masks_example(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple:
    out = torch.zeros(2, rows, width, dtype=torch.bool, device=device)
    return out, 0.3, sample_keys(1, "here", (4, 7)), range(6, 6 + rows)


@draw_keep_masks_.implementation("numpy", devices=CPU)
def _draw_on_cpu_(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range) -> None:
    if not has_memory(out) or not out.numel():
        return
    threshold = _threshold(p)
    if threshold == LEVELS:
        out.fill_(True)
        return
    for mask, key in zip(out.numpy(), keys, strict=True):
        _draw_with_numpy(mask, threshold, seed_of(*key), rows)


def keep_scale(p: float) -> float:
    """The factor of kept elements: 1 / the true probability of keeping, which is a multiple of 1 / LEVELS."""
    return LEVELS / _threshold(p)


def apply_mask(x: torch.Tensor, mask: torch.Tensor, p: float,
               residual: torch.Tensor | None = None) -> torch.Tensor:
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
        return grad.mul(mask).mul_(ctx.scale), None, None, grad if ctx.needs_input_grad[3] else None


def _threshold(p: float) -> int:
    assert 0.0 <= p < 1.0, f"a drop probability must be in [0, 1), got {p}"
    return max(1, round((1.0 - p) * LEVELS))


def _counters_per_row(cols: int) -> int:
    return -(-cols // NUMBERS_PER_COUNTER)


def _draw_with_numpy(out: np.ndarray, threshold: int, seed: int, rows: range) -> None:
    cols = out.shape[1]
    per_row = _counters_per_row(cols)
    words = np.random.Philox(key=seed, counter=rows.start * per_row).random_raw(len(rows) * per_row * 4)
    numbers = words.view(np.uint16).reshape(len(rows), per_row * NUMBERS_PER_COUNTER)[:, :cols]
    np.less(numbers, np.uint16(threshold), out=out)


def seeds_on(device: torch.device, keys: Sequence[Key]) -> torch.Tensor:
    """int64 [len(keys)]: their seeds, copied without waiting for the device."""
    seeds = torch.tensor([seed_of(*key) for key in keys], dtype=torch.int64)
    return (seeds.pin_memory() if device.type == "cuda" else seeds).to(device, non_blocking=True)


def draw_on_device_(out: torch.Tensor, threshold: int, keys: Sequence[Key], rows: range) -> None:
    """`draw_keep_masks_` by elementwise operations of out's device, over all tables at once.

    Rows are drawn in blocks that bound the working memory. Nothing waits for the device.
    """
    if threshold == LEVELS:
        out.fill_(True)
        return
    cols = out.shape[2]
    per_row = _counters_per_row(cols)
    seeds = seeds_on(out.device, keys)[:, None]
    rows_at_once = max(1, COUNTERS_AT_ONCE // (len(keys) * per_row))
    for start in range(0, len(rows), rows_at_once):
        count = min(rows_at_once, len(rows) - start)
        first = 1 + (rows.start + start) * per_row           # NumPy advances the counter before it draws
        counters = torch.arange(first, first + count * per_row, device=out.device)
        words = philox(counters, seeds)                                               # [k, counters, 4]
        numbers = words.view(torch.int16).view(len(keys), count, per_row * NUMBERS_PER_COUNTER)[:, :, :cols]
        # 16 bits as a signed number: flipping the sign bit turns the unsigned order into the signed one.
        out[:, start:start + count] = (numbers ^ -(1 << 15)) < threshold - (1 << 15)


def philox(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox 4x64-10 of 256-bit counters whose upper 192 bits are zero, and keys whose upper 64 bits are
    zero.

    counters int64 [n], keys int64 [k, 1], both read as unsigned numbers → int64 [k, n, 4].
    """
    first, second = keys, torch.zeros_like(keys)
    x0 = counters.expand(keys.shape[0], -1)
    x1 = x2 = x3 = torch.zeros_like(x0)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(x0, MULTIPLIERS[0])
        high1, low1 = _multiply(x2, MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ first, low1, high0 ^ x3 ^ second, low0
        first, second = (key + _signed(step) for key, step in zip((first, second), KEY_STEPS))    # mod 2**64
    return torch.stack((x0, x1, x2, x3), dim=-1)


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 64 bits of x * factor, all unsigned, from four products of 32-bit halves."""
    half = (1 << 32) - 1
    x_low, x_high, low, high = x & half, shift_right(x, 32), factor & half, factor >> 32
    lower, cross1, cross2 = x_low * low, x_low * high, x_high * low
    carry = shift_right(lower, 32) + (cross1 & half) + (cross2 & half)
    upper = x_high * high + shift_right(cross1, 32) + shift_right(cross2, 32) + shift_right(carry, 32)
    return upper, x * _signed(factor)


def _signed(number: int) -> int:
    """The int64 that has the bits of this unsigned number of 64 bits."""
    return number - (1 << 64) if number >> 63 else number
