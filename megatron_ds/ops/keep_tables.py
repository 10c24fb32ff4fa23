"""Tables of random numbers that decide which elements dropout keeps: keyed, the same bits on every device.

A table has rows and columns of 16-bit random numbers; an element is kept when its number is below a
threshold. Any slice of rows can be drawn alone, so a rank that holds a slice of the sequence and a
micro-batch of another size use the same table.

The numbers come from Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by the seed of a key. Row r starts at counter 1 + r * ceil(cols / 16); each counter gives sixteen
numbers. csrc/gpu/philox.cuh draws them inside kernels.

Implementations: CPUs draw with NumPy, one table after another; other devices compute all tables in one
sequence of elementwise operations on int64.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..host.device_copies import on_device
from .kernel_table import CPU, Operation
from .keyed_random import Key, seed_of, shift_right
from .meta_tensors import has_memory

LEVELS = (
    1 << 16
)  # values of a random number; so drop probabilities are multiples of 1 / LEVELS
NUMBERS_PER_COUNTER = 16  # 4 words of 64 bits
ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # Salmon et al. 2011, table 2
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # of the key from round to round
COUNTERS_AT_ONCE = (
    1 << 22
)  # limits working memory on a device: a few int64 tensors of this size


def keep_masks(
    p: float,
    keys: Sequence[Key],
    rows: range,
    cols: int,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """bool [len(keys), len(rows), cols], True = keep: these rows of each key's table, of full width."""
    masks = torch.empty(len(keys), len(rows), cols, dtype=torch.bool, device=device)
    draw_keep_masks_(masks, p, keys, rows)
    return masks


@Operation
def draw_keep_masks_(
    out: torch.Tensor, p: float, keys: Sequence[Key], rows: range
) -> None:
    """Fill `out`, bool [len(keys), len(rows), cols] of any strides, with these rows of each key's table.

    A tensor without memory stays as it is.
    """
    if torch.compiler.is_compiling():
        (_, site, *_), *_ = keys
        numbers = [part for key in keys for part in key if part != site]
        out.copy_(
            _opaque_keep_masks(
                numbers, site, p, rows.start, rows.stop, out.shape, out.device
            )
        )
    elif has_memory(out) and out.numel():
        draw_on_device_(out, threshold_of(p), keys, rows)


@draw_keep_masks_.example
def _masks_example(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple:
    out = torch.zeros(2, rows, width, dtype=torch.bool, device=device)
    return out, 0.3, [(1, "here", 4), (1, "here", 7)], range(6, 6 + rows)


@draw_keep_masks_.implementation("numpy", devices=CPU)
def _draw_on_cpu_(
    out: torch.Tensor, p: float, keys: Sequence[Key], rows: range
) -> None:
    if not has_memory(out) or not out.numel():
        return
    threshold = threshold_of(p)
    if threshold == LEVELS:
        out.fill_(True)
        return
    for mask, key in zip(out.numpy(), keys, strict=True):
        _draw_with_numpy(mask, threshold, seed_of(*key), rows)


# One operation for torch.compile, which can trace neither the hash of a key nor NumPy's generator.
@torch.library.custom_op("megatron_ds::keep_masks", mutates_args=())
def _opaque_keep_masks(
    numbers: Sequence[int],
    site: str,
    p: float,
    start: int,
    stop: int,
    shape: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """`keep_masks` of this shape; numbers: of all keys, one after another, without the site."""
    keys = [
        (first, site, *others)
        for first, *others in zip(*[iter(numbers)] * (len(numbers) // shape[0]))
    ]
    return keep_masks(p, keys, range(start, stop), shape[2], device=device)


@_opaque_keep_masks.register_fake
def _opaque_without_memory(
    numbers: Sequence[int],
    site: str,
    p: float,
    start: int,
    stop: int,
    shape: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def threshold_of(p: float) -> int:
    """Numbers below this are kept where `p` is the probability to be dropped: 1 to LEVELS."""
    assert 0.0 <= p < 1.0, f"a drop probability must be in [0, 1), got {p}"
    return max(1, round((1.0 - p) * LEVELS))


def keep_scale(p: float) -> float:
    """Return the factor of kept elements: 1 / the true probability of keeping, which is a multiple of 1 / LEVELS."""
    return LEVELS / threshold_of(p)


def _counters_per_row(cols: int) -> int:
    return -(-cols // NUMBERS_PER_COUNTER)


def _draw_with_numpy(out: np.ndarray, threshold: int, seed: int, rows: range) -> None:
    cols = out.shape[1]
    per_row = _counters_per_row(cols)
    words = np.random.Philox(key=seed, counter=rows.start * per_row).random_raw(
        len(rows) * per_row * 4
    )
    numbers = words.view(np.uint16).reshape(len(rows), per_row * NUMBERS_PER_COUNTER)[
        :, :cols
    ]
    np.less(numbers, np.uint16(threshold), out=out)


def seeds_on(device: torch.device, keys: Sequence[Key]) -> torch.Tensor:
    """int64 [len(keys)]: their seeds, copied without waiting for the device."""
    return on_device(
        torch.tensor([seed_of(*key) for key in keys], dtype=torch.int64), device
    )


def draw_on_device_(
    out: torch.Tensor, threshold: int, keys: Sequence[Key], rows: range
) -> None:
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
        first = (
            1 + (rows.start + start) * per_row
        )  # NumPy advances the counter before it draws
        counters = torch.arange(first, first + count * per_row, device=out.device)
        words = philox(counters, seeds)  # [k, counters, 4]
        numbers = words.view(torch.int16).view(
            len(keys), count, per_row * NUMBERS_PER_COUNTER
        )[:, :, :cols]
        out[:, start : start + count] = _below(numbers, threshold)


def keep_rows(p: float, keys: torch.Tensor, columns: range) -> torch.Tensor:
    """bool [n, len(columns)], True = keep: these columns of the first row of the tables of keys int64 [n].

    By elementwise operations of the device of the keys, which nothing waits for.
    """
    device = keys.device
    width = len(columns)
    out = torch.empty(len(keys), width, dtype=torch.bool, device=device)
    if not has_memory(out) or not out.numel():
        return out
    # The counters that draw these columns.
    begin, offset = divmod(columns.start, NUMBERS_PER_COUNTER)
    end = _counters_per_row(columns.stop)
    counters = torch.arange(1 + begin, 1 + end, device=device)
    held = slice(offset, offset + width)
    threshold = threshold_of(p)
    # Rows are drawn in blocks that bound the working memory.
    rows_at_once = max(1, COUNTERS_AT_ONCE // len(counters))
    for some, mask in zip(keys.split(rows_at_once), out.split(rows_at_once)):
        words = philox(counters, some[:, None])  # [rows, counters, 4]
        numbers = words.view(torch.int16).flatten(1)
        mask.copy_(_below(numbers[:, held], threshold))
    return out


def _below(numbers: torch.Tensor, threshold: int) -> torch.Tensor:
    """Return whether unsigned numbers of 16 bits, as int16, are: flipping the sign bit turns the unsigned order into
    the signed one."""
    return (numbers ^ -(1 << 15)) < threshold - (1 << 15)


def philox(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox 4x64-10 of 256-bit counters whose upper 192 bits are zero, and keys whose upper 64 bits are
    zero.

    counters int64 [n], keys int64 [k, 1], both read as unsigned numbers → int64 [k, n, 4].
    """
    first = keys
    second = torch.zeros_like(keys)
    x0 = counters.expand(keys.shape[0], -1)
    x1 = x2 = x3 = torch.zeros_like(x0)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(x0, MULTIPLIERS[0])
        high1, low1 = _multiply(x2, MULTIPLIERS[1])
        x0 = high1 ^ x1 ^ first
        x1 = low1
        x2 = high0 ^ x3 ^ second
        x3 = low0
        first, second = (
            key + _signed(step) for key, step in zip((first, second), KEY_STEPS)
        )  # mod 2**64
    return torch.stack((x0, x1, x2, x3), dim=-1)


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower 64 bits of x * factor, all unsigned, from four products of 32-bit halves."""
    half = (1 << 32) - 1
    x_low = x & half
    x_high = shift_right(x, 32)
    low = factor & half
    high = factor >> 32
    lower = x_low * low
    cross1 = x_low * high
    cross2 = x_high * low
    carry = shift_right(lower, 32) + (cross1 & half) + (cross2 & half)
    upper = (
        x_high * high
        + shift_right(cross1, 32)
        + shift_right(cross2, 32)
        + shift_right(carry, 32)
    )
    return upper, x * _signed(factor)


def _signed(number: int) -> int:
    """Return the int64 that has the bits of this unsigned number of 64 bits."""
    return number - (1 << 64) if number >> 63 else number
