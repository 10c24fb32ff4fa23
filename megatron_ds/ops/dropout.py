"""Dropout whose mask is a pure function of (seed, site, sample, position, channel), and other random numbers
that are functions of a key.

A key is a tuple of plain values, for example (seed, "decoder.layers.3.mlp", sample 17). The same key gives
the same numbers under every layout, in a recomputed forward, and after a resume: there is no global
generator, and nothing to save or restore.

A mask is a table of 16-bit random numbers, row by row; an element is kept when its number is below a
threshold. Any slice of rows can be drawn alone, so a rank that holds a slice of the sequence and a
micro-batch of another size use the same mask.

The numbers come from Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by (seed, site, sample) or (seed, site, sample, head). Row r starts at counter 1 + r * ceil(cols / 16);
each counter gives sixteen numbers. CPUs draw with NumPy, one table after another; other devices compute all
tables in one sequence of elementwise operations on int64. Both give the same bits, so a run on a GPU drops
what the same run on a CPU drops.

Where only some tokens of a sequence are present, their masks are selected from the whole table, so a token's
mask does not depend on the others.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .product import has_memory

LEVELS = 1 << 16             # values of a random number; so drop probabilities are multiples of 1 / LEVELS
NUMBERS_PER_COUNTER = 16     # 4 words of 64 bits
ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)       # Salmon et al. 2011, table 2
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)         # of the key from round to round
COUNTERS_AT_ONCE = 1 << 22   # limits working memory on a device: a few int64 tensors of this size

Key = tuple[int | str, ...]


class KeepMask(NamedTuple):
    """Which attention probabilities are kept: bool [b, n, sq, sk]; p: the probability to be dropped."""

    mask: torch.Tensor
    p: float


def dropout(x: torch.Tensor, p: float, *, seed: int, site: str, sample_ids: tuple[int, ...], rows: range,
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
    s, b, h = x.shape
    held = len(rows) if picked is None else picked.shape[1]
    assert len(sample_ids) == b and held == s, (
        f"x is {list(x.shape)}, got {len(sample_ids)} samples, {held} rows")
    keys = sample_keys(seed, site, sample_ids)
    if picked is None:
        mask = torch.empty(s, b, h, dtype=torch.bool, device=x.device)
        draw_keep_masks_(mask.transpose(0, 1), p, keys, rows)
    else:
        whole = keep_masks(p, keys, rows, h, device=x.device)                            # [b, rows, h]
        mask = whole.gather(1, picked[:, :, None].expand(-1, -1, h)).transpose(0, 1).contiguous()
    return apply_mask(x, mask, p)


def keep_masks(p: float, keys: Sequence[Key], rows: range, cols: int, *,
               device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [len(keys), len(rows), cols], True = keep: these rows of each key's table, of full width."""
    masks = torch.empty(len(keys), len(rows), cols, dtype=torch.bool, device=device)
    draw_keep_masks_(masks, p, keys, rows)
    return masks


def sample_keys(seed: int, site: str, sample_ids: Sequence[int]) -> list[Key]:
    """The key of each sample at a place in the model."""
    return [(seed, site, int(sample)) for sample in sample_ids]


def attention_keep_mask(p: float, keys: Sequence[Key], *, heads: range, rows: range, cols: int,
                        picked: torch.Tensor | None = None,
                        device: torch.device | str = "cpu") -> KeepMask:
    """The mask of attention probabilities, [b, n, sq, sk].

    keys    of the b samples, from `sample_keys`
    heads   global numbers of the n heads
    rows    query positions; `cols` key positions
    picked  int64 [b, k]: only these rows (counted from the first) and columns of each sample; [b, n, k, k]
    """
    of_heads = [(*key, head) for key in keys for head in heads]
    masks = keep_masks(p, of_heads, rows, cols, device=device).view(len(keys), len(heads), len(rows), cols)
    if picked is not None:
        masks = masks.gather(2, picked[:, None, :, None].expand(-1, len(heads), -1, cols))
        masks = masks.gather(3, picked[:, None, None, :].expand(-1, len(heads), picked.shape[1], -1))
    return KeepMask(masks, p)


def draw_keep_masks_(out: torch.Tensor, p: float, keys: Sequence[Key], rows: range) -> None:
    """Fill `out`, bool [len(keys), len(rows), cols] of any strides, with these rows of each key's table.

    A tensor without memory stays as it is.
    """
    if not has_memory(out) or not out.numel():
        return
    threshold = _threshold(p)
    seeds = [seed_of(*key) for key in keys]
    if threshold == LEVELS:
        out.fill_(True)
    elif out.device.type == "cpu":
        for mask, seed in zip(out.numpy(), seeds, strict=True):
            _draw_with_numpy(mask, threshold, seed, rows)
    else:
        draw_on_device_(out, threshold, seeds, rows)


def keep_scale(p: float) -> float:
    """The factor of kept elements: 1 / the true probability of keeping, which is a multiple of 1 / LEVELS."""
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


def _counters_per_row(cols: int) -> int:
    return -(-cols // NUMBERS_PER_COUNTER)


def _draw_with_numpy(out: np.ndarray, threshold: int, seed: int, rows: range) -> None:
    cols = out.shape[1]
    per_row = _counters_per_row(cols)
    words = np.random.Philox(key=seed, counter=rows.start * per_row).random_raw(len(rows) * per_row * 4)
    numbers = words.view(np.uint16).reshape(len(rows), per_row * NUMBERS_PER_COUNTER)[:, :cols]
    np.less(numbers, np.uint16(threshold), out=out)


def draw_on_device_(out: torch.Tensor, threshold: int, seeds: Sequence[int], rows: range) -> None:
    """`draw_keep_masks_` by elementwise operations of out's device, over all tables at once.

    Rows are drawn in blocks that bound the working memory. Nothing waits for the device.
    """
    cols = out.shape[2]
    per_row = _counters_per_row(cols)
    keys = torch.tensor(seeds, dtype=torch.int64)
    keys = (keys.pin_memory() if out.is_cuda else keys).to(out.device, non_blocking=True)[:, None]
    rows_at_once = max(1, COUNTERS_AT_ONCE // (len(seeds) * per_row))
    for start in range(0, len(rows), rows_at_once):
        count = min(rows_at_once, len(rows) - start)
        first = 1 + (rows.start + start) * per_row           # NumPy advances the counter before it draws
        counters = torch.arange(first, first + count * per_row, device=out.device)
        words = philox(counters, keys)                                                # [k, counters, 4]
        numbers = words.view(torch.int16).view(len(seeds), count, per_row * NUMBERS_PER_COUNTER)[:, :, :cols]
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


BITS = 63          # of a seed: torch.Generator takes a signed 64-bit number
GOLDEN = -0x61C8864680B583EB         # 2**64 / golden ratio, as a signed number


def seed_of(*key: int | str) -> int:
    """A seed that depends on every part of the key, and on their order and types."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") >> (128 - BITS)


def generator_of(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator, seeded by the key."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def random_numbers(keys: Sequence[tuple[int | str, ...]], count: int,
                   device: torch.device | str = "cpu", *, first: int = 0) -> torch.Tensor:
    """int64 [len(keys), count], uniform over all 64 bits, the same bits on every device.

    Number i of a key, counting from 0, is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", figure 16) started at the key's seed, after i + 1 steps. These are the
    numbers from `first` on.
    """
    starts = torch.tensor([seed_of(*key) for key in keys], dtype=torch.int64).to(device, non_blocking=True)
    z = starts[:, None] + GOLDEN * torch.arange(first + 1, first + count + 1, device=device)    # mod 2**64
    z = (z ^ shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shift_right(z, 31)


def random_subset(keys: Sequence[tuple[int | str, ...]], kept: int, of: int,
                  device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [len(keys), kept]: for each key `kept` different numbers below `of`, ascending, all subsets
    equally likely.

    The subset consists of the numbers with the smallest random keys, so a larger one contains the smaller
    ones.
    """
    order = random_numbers(keys, of, device).argsort(dim=1, stable=True)
    return order[:, :kept].sort(dim=1).values


def shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits of the unsigned number with the bits of z."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
