"""Segments of torch's CUDA allocator, worked out by hand from its rules."""

import pytest

from megatron_ds.planning.cuda_segments import MIB, reserved

pytestmark = pytest.mark.plan


@pytest.mark.parametrize(
    "requests, expected",
    [
        ([], 0),
        ([0], 0),
        ([1], 2 * MIB),
        ([512] * 4096, 2 * MIB),
        ([513] * 2049, 4 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([5 * MIB] * 4, 20 * MIB),
        ([5 * MIB] * 5, 40 * MIB),
        (
            [6 * MIB] * 4,
            40 * MIB,
        ),  # three in one segment, the rest of 2 MiB serves none
        ([6 * MIB] * 3 + [2 * MIB], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1], 12 * MIB),
        ([100 * MIB + 1], 102 * MIB),
        ([100 * MIB + 1, 2 * MIB], 122 * MIB),  # the rest is smaller by a grain
        ([10 * MIB + 512, 1 * MIB], 14 * MIB),
    ],
)  # small ones never share with large ones
def test_segments_follow_from_the_requests(requests, expected):
    assert reserved(requests) == expected


def test_as_many_bytes_as_requested_at_least():
    requests = [(i * 7919) % (3 * MIB) + 1 for i in range(200)]
    assert sum(requests) <= reserved(requests) < sum(requests) + 40 * MIB
