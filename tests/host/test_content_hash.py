"""The hash of arrays depends on every byte and on where an array ends."""

import numpy as np
import pytest

from megatron_ds.host import content_hash as module
from megatron_ds.host.content_hash import content_hash

pytestmark = pytest.mark.plan


def test_every_byte_counts(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 7)
    data = np.arange(40, dtype=np.int16)
    seen = {content_hash([data])}
    for at in range(data.nbytes):
        other = data.copy()
        other.view(np.uint8)[at] ^= 1
        seen.add(content_hash([other]))
    assert len(seen) == 1 + data.nbytes
    assert content_hash([data.copy()]) in seen


def test_arrays_are_kept_apart():
    data = np.arange(6, dtype=np.uint8)
    cuts = [[data], [data[:2], data[2:]], [data[:3], data[3:]], [data, data[:0]]]
    assert len({content_hash(cut) for cut in cuts}) == len(cuts)
