"""Random numbers that are functions of a key, the same on every device.

A key is a tuple of plain values, for example (seed, "decoder.layers.3.mlp", sample 17). There is no global
generator, and nothing to save or restore.
"""

import hashlib
from collections.abc import Sequence

import torch

from ..host.device_copies import on_device

Key = tuple[int | str, ...]
BITS = 63  # of a seed: torch.Generator takes a signed 64-bit number
GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number


def seed_of(*key: int | str) -> int:
    """Return a seed that depends on every part of the key, and on their order and types."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") >> (128 - BITS)


def generator_of(
    *key: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a new generator, seeded by the key."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))


def random_numbers(
    keys: Sequence[Key],
    count: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
) -> torch.Tensor:
    """int64 [len(keys), count], uniform over all 64 bits, the same bits on every device.

    Number i of a key, counting from 0, is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", figure 16) started at the key's seed, after i + 1 steps. These are the
    numbers from `first` on.
    """
    seeds = torch.tensor([seed_of(*key) for key in keys], dtype=torch.int64)
    starts = on_device(seeds, torch.device(device))
    z = starts[:, None] + GOLDEN * torch.arange(
        first + 1, first + count + 1, device=device
    )  # mod 2**64
    z = (z ^ shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shift_right(z, 31)


def random_subset(
    keys: Sequence[Key], kept: int, of: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
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
