"""The shape check of pipeline ranks: which difference between two steps is reported."""

import pytest
import torch

from megatron_ds.mpu.channels import MOST_RUNS, describe_difference, encode_shapes

pytestmark = pytest.mark.plan


def test_equal_steps_have_no_difference():
    shapes = [(5, 2, 6)] * 3 + [(5, 1, 6)]
    assert (
        describe_difference(
            encode_shapes(shapes, torch.bfloat16),
            encode_shapes(list(shapes), torch.bfloat16),
        )
        == ""
    )


def test_the_first_micro_batch_that_differs_is_named_with_both_shapes_and_dtypes():
    mine, other = [(5, 2, 6)] * 4, [(5, 2, 6)] * 2 + [(5, 3, 6)] * 2
    assert describe_difference(
        encode_shapes(mine, torch.float32), encode_shapes(other, torch.float32)
    ) == (
        "micro-batch 2 was expected as [5, 2, 6] float32, but the sender has [5, 3, 6] float32"
    )
    assert describe_difference(
        encode_shapes(mine, torch.float32), encode_shapes(mine, torch.bfloat16)
    ) == (
        "micro-batch 0 was expected as [5, 2, 6] float32, but the sender has [5, 2, 6] bfloat16"
    )


def test_another_number_of_micro_batches_is_reported():
    four, three = (
        encode_shapes([(5, 2, 6)] * count, torch.float32) for count in (4, 3)
    )
    assert describe_difference(four, three) == (
        "this rank's step has 4 micro-batches, the sender's has 3"
    )


def test_a_difference_beyond_the_runs_of_the_message_is_found_by_the_checksum():
    mine = [(length, 2, 6) for length in range(2 * MOST_RUNS)]
    other = [*mine[:-1], (99, 2, 6)]
    assert (
        encode_shapes(mine, torch.float32).shape
        == encode_shapes([], torch.float32).shape
    )
    found = describe_difference(
        encode_shapes(mine, torch.float32), encode_shapes(other, torch.float32)
    )
    assert (
        found
        == f"a micro-batch after number {MOST_RUNS - 1} has another shape than expected"
    )
