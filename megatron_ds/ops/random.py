"""Random numbers as a pure function of a key: no global generator, nothing to save, nothing to restore.

A key is a tuple of plain values, say (seed, "decoder.layers.3.mlp", sample 17). The same key gives the same numbers under
every layout, in a recomputed forward, and after a resume.
"""

import hashlib

import torch

BITS = 63          # of a seed: torch.Generator takes a signed 64-bit number


def seed_of(*key: int | str) -> int:
    """A seed that depends on every part of the key, and on their order and types."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") >> (128 - BITS)


def generator_of(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator that belongs to the key alone."""
    return torch.Generator(device=device).manual_seed(seed_of(*key))
