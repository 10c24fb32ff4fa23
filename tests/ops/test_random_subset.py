"""Random numbers and subsets that follow from a key, against whole numbers of Python."""

import itertools

import pytest
import torch

from megatron_ds.ops.keyed_random import random_numbers, random_subset, seed_of

pytestmark = pytest.mark.plan

MASK = 2**64 - 1


def splitmix(start: int, count: int) -> list[int]:
    """Steele et al. 2014, figure 16, without wrapping machine words."""
    numbers, state = [], start
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ z >> 31)
    return numbers


def test_the_generator_gives_the_numbers_that_are_published_for_seed_0():
    assert splitmix(0, 3) == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_numbers_are_those_of_splitmix_bit_for_bit():
    keys = [
        (1234, "random_ltd", f"decoder.layers.{layer}", sample)
        for layer, sample in ((0, 0), (3, 17), (95, 10**12))
    ]
    drawn = random_numbers(keys, 100)
    assert [[n & MASK for n in row] for row in drawn.tolist()] == [
        splitmix(seed_of(*key), 100) for key in keys
    ]
    assert torch.equal(random_numbers(keys, 30, first=63), drawn[:, 63:93])


@pytest.mark.parametrize("kept, of", [(1, 1), (1, 9), (4, 9), (9, 9), (64, 257)])
def test_a_subset_holds_the_places_of_the_smallest_numbers_in_order(kept, of):
    """As signed numbers, which is how they are compared."""
    keys = [("a", i) for i in range(5)]
    for key, row in zip(keys, random_subset(keys, kept, of).tolist(), strict=True):
        signed = [n - 2**64 if n >> 63 else n for n in splitmix(seed_of(*key), of)]
        assert row == sorted(sorted(range(of), key=signed.__getitem__)[:kept])


def test_a_larger_subset_holds_the_smaller_ones_of_its_key():
    rows = [
        set(random_subset([("key", 3)], kept, 50)[0].tolist()) for kept in range(1, 51)
    ]
    assert all(a < b for a, b in itertools.pairwise(rows))


def test_every_subset_is_as_likely_as_another():
    """6,000 draws of 3 from 6: 20 subsets, 300 expected of each; chi squared with 19 degrees of freedom,
    99.99 % below 53."""
    draws = random_subset([("fair", i) for i in range(6000)], 3, 6).tolist()
    counts = [
        sum(tuple(row) == subset for row in draws)
        for subset in itertools.combinations(range(6), 3)
    ]
    assert sum(counts) == 6000 and sum((n - 300) ** 2 / 300 for n in counts) < 53


def test_every_part_of_a_key_counts():
    keys = [(1, "a", 2), (2, "a", 2), (1, "b", 2), (1, "a", 3)]
    assert len({tuple(row) for row in random_subset(keys, 8, 64).tolist()}) == 4


def test_a_dry_run_draws_shapes_only():
    drawn = random_subset([(1,), (2,)], 3, 8, device="meta")
    assert drawn.is_meta and drawn.shape == (2, 3) and drawn.dtype == torch.int64
