"""Rows travel in a known order, by expert and then by token: a problem of eight tokens worked out by hand."""

import pytest
import torch

from megatron_ds.moe.dispatch import Dispatch, Groups
from megatron_ds.moe.router import choose
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from tests.harness.golden_routing import LOGITS, E, K, routing_config
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

H = 16
# (expert, token) of the rows of each rank, which holds four tokens and two experts.
SENT = [
    [(0, 0), (0, 1), (0, 2), (1, 3), (2, 2), (2, 3), (3, 0), (3, 1)],
    [(0, 5), (0, 6), (0, 7), (1, 4), (2, 7), (3, 4), (3, 5), (3, 6)],
]
COMPUTED = [
    [(0, 0), (0, 1), (0, 2), (0, 5), (0, 6), (0, 7), (1, 3), (1, 4)],
    [(2, 2), (2, 3), (2, 7), (3, 0), (3, 1), (3, 4), (3, 5), (3, 6)],
]


def main(rank, world):
    ep = world.group("ep", (0, 1), rank)
    here = slice(4 * rank, 4 * rank + 4)
    routing = choose(LOGITS[here], routing_config())
    dispatch = Dispatch(routing, E, Groups(ep, solo("tp"), False))
    tokens = torch.arange(8.0)[here, None].expand(4, H).contiguous()
    ep.traffic.clear()
    arrived = dispatch.arrive(dispatch.send(tokens))
    out = ep.traffic.bytes["all_to_all_v", "ep", 2]
    dispatch.back(arrived)
    sent = [
        (int(routing.experts.flatten()[slot]), 4 * rank + slot // K)
        for slot in dispatch._order.tolist()
    ]
    computed = [int(row[0]) for row in arrived]
    return (
        sent,
        computed,
        dispatch.runs.counts,
        out,
        ep.traffic.bytes["all_to_all_v", "ep", 2] - out,
    )


def test_rows_leave_and_are_computed_by_expert_and_by_token_within_an_expert():
    for rank, (sent, computed, counts, out, back) in enumerate(run_ranks(2, main)):
        assert sent == SENT[rank]
        assert computed == [token for _, token in COMPUTED[rank]]
        assert counts == tuple(
            sum(e == 2 * rank + i for e, _ in COMPUTED[rank]) for i in range(2)
        )
        assert (out, back) == (4 * H * 4, 4 * H * 4)  # four rows cross each way


@pytest.mark.parametrize(
    "axis, groups",
    [
        ("ep", [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        ("edp", [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)]),
    ],
)
def test_groups_of_sixteen_ranks_with_two_tensor_parallel_and_four_expert_parallel_ones(
    axis, groups
):
    assert sorted(Grid.fit(16, tp=2, ep=4).groups(axis)) == groups
