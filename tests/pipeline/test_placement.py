"""Where stages live, and what computing them costs."""

import pytest

from megatron_ds.errors import ScheduleError
from megatron_ds.pipeline.instruction import Instruction, Op, StageCosts
from megatron_ds.pipeline.schedules import placement, stages_of

pytestmark = pytest.mark.plan


def test_stages_go_round_the_ranks_but_there_and_back_for_zb_v():
    assert placement("1f1b", 3, 1) == (0, 1, 2)
    assert placement("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert placement("zb-v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert [stages_of(rank, placement("zb-v", 3, 2)) for rank in range(3)] == [
        (0, 5),
        (1, 4),
        (2, 3),
    ]
    assert stages_of(1, placement("interleaved", 2, 4)) == (1, 3, 5, 7)


def test_a_cost_is_one_number_or_one_for_each_stage_and_b_is_i_and_w():
    costs = StageCosts(forward=(1, 2), input_grad=3, weight_grad=(4, 5), transfer=0.5)
    assert [
        costs.of(Instruction(op, 1, 0))
        for op in (Op.F, Op.I, Op.W, Op.B, Op.SEND_ACT, Op.SEND_GRAD)
    ] == [2, 3, 5, 8, 0.5, 0.5]
    assert (
        costs.of(Instruction(Op.RECV_ACT, 1, 0))
        == costs.of(Instruction(Op.TIE, 1))
        == 0
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: StageCosts(forward=-1), "forward=-1 is not a cost.*0 or more"),
        (
            lambda: StageCosts(weight_grad=(1, float("nan"))),
            "weight_grad=.*is not a cost",
        ),
        (
            lambda: StageCosts(forward=(1, 2), transfer=(1, 2, 3)),
            "2 stages for forward, 3 stages for transfer",
        ),
        (
            lambda: StageCosts(forward=(1, 2)).of(Instruction(Op.F, 2, 0)),
            "costs of 2 stages, but .* stage 2",
        ),
    ],
)
def test_costs_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()
