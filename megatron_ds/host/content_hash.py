"""`content_hash`: a hash of all bytes of arrays, computed by several threads."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BLOCK_BYTES = 1 << 24
THREADS = 4  # hashlib releases the interpreter lock


def content_hash(arrays: Iterable[np.ndarray]) -> str:
    """Return a hash of the bytes of contiguous arrays: the SHA-256 of the SHA-256 of each block of 16 MiB. Reads
    all of them."""
    blocks = []
    for array in arrays:
        flat = np.zeros(0, np.uint8)
        if array.size:
            flat = array.view(np.uint8).reshape(-1)
        starts = range(0, len(flat), BLOCK_BYTES)
        parts = [flat[at : at + BLOCK_BYTES] for at in starts]
        blocks.append(parts)
    whole = hashlib.sha256()
    with ThreadPoolExecutor(THREADS) as pool:
        for parts in blocks:
            # With the number of blocks of each array, the same bytes in other arrays have another hash.
            count = len(parts)
            whole.update(count.to_bytes(8, "little"))
            for digest in pool.map(_digest, parts):
                whole.update(digest)
    return whole.hexdigest()[:32]


def _digest(block: np.ndarray) -> bytes:
    return hashlib.sha256(block.data).digest()
