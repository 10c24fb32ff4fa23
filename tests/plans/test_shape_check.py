"""What two ranks of a pipeline say to each other before they send hidden states."""

import torch

from megatron_ds.mpu.shape_check import MOST_RUNS, difference, make_promise


def test_equal_promises_differ_in_nothing():
    shapes = [(5, 2, 6)] * 3 + [(5, 1, 6)]
    assert difference(make_promise(shapes, torch.bfloat16), make_promise(list(shapes), torch.bfloat16)) == ""


def test_the_first_micro_batch_that_differs_is_named_with_both_shapes_and_dtypes():
    mine, other = [(5, 2, 6)] * 4, [(5, 2, 6)] * 2 + [(5, 3, 6)] * 2
    assert difference(make_promise(mine, torch.float32), make_promise(other, torch.float32)) == (
        "micro-batch 2 was expected as [5, 2, 6] float32, but comes as [5, 3, 6] float32")
    assert difference(make_promise(mine, torch.float32), make_promise(mine, torch.bfloat16)) == (
        "micro-batch 0 was expected as [5, 2, 6] float32, but comes as [5, 2, 6] bfloat16")


def test_another_number_of_micro_batches_is_told():
    assert difference(make_promise([(5, 2, 6)] * 4, torch.float32), make_promise([(5, 2, 6)] * 3, torch.float32)) == (
        "expected a step of 4 micro-batches, but that one takes a step of 3")


def test_a_difference_behind_what_there_is_room_for_is_found_all_the_same():
    mine = [(length, 2, 6) for length in range(2 * MOST_RUNS)]
    other = [*mine[:-1], (99, 2, 6)]
    assert make_promise(mine, torch.float32).shape == make_promise([], torch.float32).shape
    words = difference(make_promise(mine, torch.float32), make_promise(other, torch.float32))
    assert words == f"one of the micro-batches after number {MOST_RUNS - 1} has another shape than expected"
