"""Seconds of recorded work on a device.

products   cut into tiles that the processors of the device share: the last round of tiles may be partly empty.
           The fastest of three forms of tiles counts, as libraries choose. Not faster than its bytes
attention  its FLOPs at the share of the peak that attention reaches, not faster than its bytes
others     bytes, at the share of the bandwidth that kernels reach
each       the launch, in addition
"""

import math
from functools import lru_cache

import torch

from ...ops.work import CallWork, Product
from .device import Device

# (rows, columns, share of the speed of large tiles)
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75))


def seconds_of(work: CallWork, device: Device) -> float:
    """Return the seconds of one call."""
    constants = device.constants
    bandwidth = device.bandwidth * constants.memory
    moving = work.nbytes / bandwidth
    peak = device.peak_of(work.dtype)
    speed = peak * constants.attention
    computing = work.scores / speed
    for product in work.products:
        computing += product_seconds(product, work.dtype, device)
    longest = max(moving, computing)
    return longest + constants.launch


@lru_cache(maxsize=100_000)
def _tiled_flops(product: Product, processors: int) -> float:
    """Return the FLOPs for which a product keeps the device busy: whole rounds of whole tiles, in large tiles."""
    found = math.inf
    for rows, columns, share in TILES:
        down = math.ceil(product.rows / rows)
        across = math.ceil(product.columns / columns)
        rounds = math.ceil(product.number * down * across / processors)
        of_tile = 2.0 * rows * columns * product.inner
        whole = rounds * processors * of_tile
        found = min(found, whole / share)
    return found


def product_seconds(product: Product, dtype: torch.dtype, device: Device) -> float:
    """Return the seconds of products of matrices, without their launch."""
    peak = device.peak_of(dtype)
    speed = peak * device.constants.product
    if not device.processors:
        return product.flops / speed
    processors = int(device.processors)
    return _tiled_flops(product, processors) / speed
