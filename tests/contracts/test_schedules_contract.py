"""What every registered schedule promises, for every shape it accepts."""

import os
from functools import lru_cache

import pytest

from megatron_ds.errors import ScheduleError
from megatron_ds.pipeline.instruction import COMPUTE, SENDS, Op
from megatron_ds.pipeline.passes import add_transfers, forward_only, lower
from megatron_ds.pipeline.schedules import SCHEDULES, placement
from megatron_ds.pipeline.simulate import check, simulate

pytestmark = pytest.mark.one_in(2)

SIZES, MICROBATCHES, CHUNKS = (
    range(1, 9),
    (1, 2, 3, 5, 8, 9, 12, 16, 19, 32),
    (1, 2, 3, 4),
)
ALL = bool(os.environ.get("MEGATRON_DS_TEST_ALL"))
# p · m · chunks: of three and more chunks on a rank, larger shapes are left to `make test-all`, and those
# larger than SMALL take turns in ZERO
LARGE, SMALL = (float("inf"), float("inf")) if ALL else (128, 64)
SHAPES = [
    (p, m, chunks)
    for p in SIZES
    for m in MICROBATCHES
    for chunks in CHUNKS
    if chunks < 3 or p * m * chunks <= LARGE
]
# (gather, reduce_each): stages 0 and 1, 2, 3 and 3
ZERO = ((False, False), (False, True), (True, False), (True, True))


@pytest.fixture(scope="module", params=SCHEDULES.names())
def name(request):
    """A schedule; all tests of one follow each other, so that the shapes of one are kept."""
    return request.param


@lru_cache(maxsize=1)
def accepted(name):
    """(p, m, chunks, schedule) of each shape that is not refused."""
    return [*_accepted(name)]


def _accepted(name):
    for p, m, chunks in SHAPES:
        try:
            yield p, m, chunks, SCHEDULES[name](p, m, chunks)
        except ScheduleError as refusal:
            assert "Valid" in str(refusal) or "Use" in str(refusal), (
                f"{name}{p, m, chunks}: no alternative in {refusal}"
            )


def test_some_shape_is_accepted_for_every_number_of_ranks_and_of_microbatches(name):
    assert {(p, m) for p, m, *_ in accepted(name)} == {(p, m) for p, m, _ in SHAPES}


def test_a_schedule_holds_computations_only_one_program_per_rank(name):
    for p, _, _, schedule in accepted(name):
        assert (
            len(schedule) == p
            and {i.op for program in schedule for i in program} <= COMPUTE
        )


def test_lowered_it_is_complete_and_finishes_even_where_streams_share_a_queue_with_any_zero_stage(
    name,
):
    for case, (p, m, chunks, schedule) in enumerate(accepted(name)):
        stages = p * chunks
        span = check(schedule, stages, m).span
        for gather, reduce_each in (
            ZERO if stages * m <= SMALL else ZERO[case % 4 :][:1]
        ):
            lowered = lower(
                schedule,
                stages,
                tied={0, stages - 1} if case % 3 else (),
                gather=gather,
                reduce_each=reduce_each,
            )
            simulation = check(lowered, stages, m)  # raises for a deadlock
            assert (
                simulation.span == span
            )  # transfers and ties cost no time of their own
        check(forward_only(lowered), stages, m, forward_only=True)


def test_no_rank_keeps_more_alive_than_declared_and_some_rank_keeps_as_much(name):
    for p, m, chunks, schedule in accepted(name):
        declared = [SCHEDULES[name].peak(p, m, chunks, rank) for rank in range(p)]
        assert max(declared) <= m * chunks
        kept = simulate(schedule).peak_live
        assert all(n <= most for n, most in zip(kept, declared)) and max(kept) == max(
            declared
        ), (p, m, chunks)


def test_its_forwards_alone_are_a_legal_evaluation(name):
    for p, m, chunks, schedule in accepted(name):
        check(
            add_transfers(forward_only(schedule), p * chunks),
            p * chunks,
            m,
            forward_only=True,
        )


def test_gradients_of_a_stage_are_summed_in_the_order_of_the_microbatches(name):
    # This is what makes gradients equal to those of one process to the last bit.
    for _, m, _, schedule in accepted(name):
        for program in schedule:
            for stage in {i.stage for i in program}:
                order = [
                    i.microbatch
                    for i in program
                    if i.stage == stage and i.op in (Op.B, Op.W)
                ]
                assert order == list(range(m))


def test_placement_follows_from_sizes_alone_and_neighbours_on_a_rank_send_nothing(name):
    for p, m, chunks, schedule in accepted(name):
        homes = placement(name, p, chunks)
        assert all(
            homes[i.stage] == rank
            for rank, program in enumerate(schedule)
            for i in program
        )
        assert len(homes) == p * chunks and {
            homes.count(rank) for rank in range(p)
        } == {chunks}
        hops = sum(a != b for a, b in zip(homes, homes[1:]))
        sends = [
            i
            for program in add_transfers(schedule, p * chunks)
            for i in program
            if i.op in SENDS
        ]
        assert len(sends) == 2 * m * hops
