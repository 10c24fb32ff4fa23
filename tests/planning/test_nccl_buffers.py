"""Buffers of NCCL in a plan: a closed form on several layouts, limits of groups, and NCCL's variables."""

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run.bytes_text import memory_text
from megatron_ds.extensions.dry_run.nccl_buffers import CHANNELS as C
from megatron_ds.extensions.dry_run.nccl_buffers import CHANNELS_OF_A_PEER as P
from megatron_ds.extensions.dry_run.nccl_buffers import nccl_buffers
from megatron_ds.extensions.dry_run.world_plan import plan_world

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --mock-data "
    "--dry-run --global-batch-size 48 --lr 1e-3 --train-iters 5 --vocab-size 1000 --bf16 "
    "--untie-embeddings-and-output-weights"
).split()
# Simple 4 MiB, LL 512 KiB, LL128 4,800 KiB: of one peer and channel.
CONNECTION = (4096 + 512 + 4800) * 1024
RING_AND_TREE_OF_2 = 2 * C
RING_AND_TREE = 3 * C
EXPERTS = "--num-experts 4 --moe-router-topk 2"
LANES = 4


def planned(flags: str):
    config = parse([*JOB, *flags.split()])
    words = flags.split()
    size = int(words[words.index("--world-size") + 1])
    assert config.world_size == size
    return plan_world(config)


def connections(flags: str, **environ: str) -> int:
    plan = planned(flags)
    found = nccl_buffers(plan.rank_plan(0), plan.config, plan.grid, environ)
    assert found % CONNECTION == 0 or environ
    return found // CONNECTION


@pytest.mark.parametrize(
    "flags, expected",
    [
        # one communicator: data-parallel ranks are the world
        ("--world-size 2", RING_AND_TREE_OF_2),
        ("--world-size 4", RING_AND_TREE),
        # gathers of ZeRO 3 have a ring of their own
        ("--world-size 4 --zero-stage 3", RING_AND_TREE + C),
        # tp and the world are apart where there are several tp groups; dp-cp and tp-pp, too
        (
            "--world-size 8 --tensor-model-parallel-size 2",
            RING_AND_TREE_OF_2 + 2 * RING_AND_TREE,
        ),
        # lanes of a pipeline, to two neighbours; sums of the world go over the same ranks
        (
            "--world-size 4 --pipeline-model-parallel-size 4",
            RING_AND_TREE + P * LANES * 2,
        ),
        # experts: all-to-all with each other rank of ep, over the ranks of the world
        (
            f"--world-size 4 --expert-model-parallel-size 4 {EXPERTS}",
            RING_AND_TREE + P * 3,
        ),
    ],
)
def test_connections_are_those_of_a_closed_form(flags, expected):
    assert connections(flags) == expected


def test_limits_of_groups_and_variables_of_nccl_count():
    tp = "--world-size 8 --tensor-model-parallel-size 2"
    of_others = 2 * RING_AND_TREE
    assert connections(f"{tp} --nccl-max-ctas tp=3") == 2 * 3 + of_others
    assert connections(f"{tp} --nccl-max-ctas tp=99") == connections(tp)
    pp = "--world-size 4 --pipeline-model-parallel-size 4"
    assert connections(f"{pp} --nccl-max-ctas pp=1") == 3 + LANES * 2
    # variables
    assert connections(tp, NCCL_MAX_CTAS="4") == (2 + 3 + 3) * 4
    assert connections(tp, NCCL_MAX_NCHANNELS="2", NCCL_MAX_CTAS="4") == (2 + 6) * 2
    less = CONNECTION - 3 * 2**20
    plan = planned("--world-size 2")
    values = plan.rank_plan(0), plan.config, plan.grid
    assert nccl_buffers(*values, {"NCCL_BUFFSIZE": "0x100000"}) == 2 * C * less
    with pytest.raises(ConfigError, match="NCCL_BUFFSIZE=4M: NCCL takes a number"):
        nccl_buffers(*values, {"NCCL_BUFFSIZE": "4M"})


def test_a_plan_for_gpus_has_a_row_that_is_not_in_the_peak():
    text = "\n".join(memory_text(planned("--world-size 2")))
    row = next(line for line in text.splitlines() if "NCCL buffers" in line)
    assert row.split()[-2:] == ["294.0", "MiB"]
    assert 2 * C * CONNECTION == 294 * 2**20
    assert "NCCL buffers" not in "\n".join(memory_text(planned("--world-size 1")))
