"""What every registered schedule promises, for every shape it accepts."""

import pytest

from megatron_ds.errors import ScheduleError
from megatron_ds.pipeline.instruction import Op
from megatron_ds.pipeline.passes import COMPUTE, add_transfers, forward_only, lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import check

SHAPES = [(p, m, chunks) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 8, 12, 16) for chunks in (1, 2, 3)]


def accepted(name):
    """(p, m, chunks, schedule) of each shape that is not refused."""
    for p, m, chunks in SHAPES:
        try:
            yield p, m, chunks, SCHEDULES[name](p, m, chunks)
        except ScheduleError as refusal:
            assert "Legal" in str(refusal) or "Use" in str(refusal), f"{name}{p, m, chunks}: no alternative in {refusal}"


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_some_shape_is_accepted_for_every_number_of_ranks(name):
    assert {p for p, *_ in accepted(name)} == {p for p, *_ in SHAPES}


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_schedule_holds_computations_only_one_program_per_rank(name):
    for p, _, _, schedule in accepted(name):
        assert len(schedule) == p and {i.op for program in schedule for i in program} <= COMPUTE


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_lowered_it_is_complete_and_runs_even_when_sends_wait_for_their_receives(name):
    for p, m, chunks, schedule in accepted(name):
        stages = p * chunks
        simulation = check(lower(schedule, stages, tied={0, stages - 1}), stages, m)
        assert simulation.span == check(schedule, stages, m).span         # transfers and ties cost no time of their own
        assert max(simulation.peak_live) <= m * chunks


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_its_forwards_alone_are_a_legal_evaluation(name):
    for p, m, chunks, schedule in accepted(name):
        check(add_transfers(forward_only(schedule), p * chunks), p * chunks, m, forward_only=True)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_gradients_of_a_stage_are_summed_in_the_order_of_the_microbatches(name):
    # This is what makes gradients equal to those of one process to the last bit.
    for _, m, _, schedule in accepted(name):
        for program in schedule:
            for stage in {i.stage for i in program}:
                order = [i.microbatch for i in program if i.stage == stage and i.op in (Op.B, Op.W)]
                assert order == list(range(m))
