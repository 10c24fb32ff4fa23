"""What recomputed blocks keep of their inputs, in parts and in host memory, against inputs kept whole: on
threads, on a GPU that does not exist, and in plans."""

import json
from unittest.mock import patch

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import Ledger
from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.startup.startup_text import kept_inputs_text
from megatron_ds.host.side_streams import Mark, SideStream
from megatron_ds.host.waiting_tensors import WaitingTensor, WaitingTensors
from megatron_ds.models.kept_input import InputKeeper
from megatron_ds.mpu.group import solo
from tests.harness.fake_cuda import DEFAULT, FakeGpu, fake_cuda
from tests.harness.layout_comparison import difference
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE
from tests.kernels.test_gpu_steps import train
from tests.planning.test_activations import JOB, RANKS, STYLES, kept

pytestmark = pytest.mark.threads

FEW = 4
IN_HOST = "recompute=full,inputs_in_cpu=1"


def batch_of(ledger: Ledger) -> Batch:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(ids, ids, ids.float(), ids, (0,), ledger=ledger)


@pytest.mark.parametrize(
    "ranks, shape", [(1, (3, 1, 5)), (2, (2, 3, 4)), (3, (7, 1, 1)), (4, (1, 1, 2))]
)
def test_ranks_keep_a_part_each_and_get_the_whole(ranks, shape):
    """Also where parts are not equal, or empty."""
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()

    def main(rank, world):
        group = world.group("tp", tuple(range(ranks)), rank)
        again = InputKeeper(group, None)(x, batch_of(Ledger()))
        part = again.args[0].__self__[0]
        assert part.numel() == -(-x.numel() // ranks)
        assert ranks == 1 or part.untyped_storage().nbytes() == part.nbytes
        y = again()
        assert y.requires_grad and y.is_leaf and not again.args[0].__self__
        return y.detach()

    assert all(torch.equal(y, x) for y in run_ranks(ranks, main))


@pytest.mark.parametrize("style", ["gpt", "llama", "bert"])
@pytest.mark.parametrize(
    "flags, share",
    [
        ("--tensor-model-parallel-size 2 --distribute-saved-activations", 2),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --distribute-saved-activations",
            1,
        ),
        ("--tensor-model-parallel-size 2 --checkpoint-in-cpu", 1),
    ],
)
def test_on_a_cpu_parts_are_kept_as_planned_and_the_rest_as_without(
    style, flags, share
):
    job = [
        *STYLES[style],
        *flags.split(),
        *"--recompute-granularity full --seq-length 24 --micro-batch-size 3".split(),
    ]
    measured, said, planned = kept(job, 2, slice(0, 6))
    blocks = 3 * 24 * 3 * 64 * 4
    assert measured == planned == said - blocks * (share - 1) // share


# ------------------------------------------------------------------ a GPU that does not exist
@pytest.mark.parametrize(
    "layout, dtype",
    [
        (f"{IN_HOST},pp=2,dp=2,zero=1", "bf16"),
        (f"{IN_HOST},tp=2,parts=1", "fp32"),
        (f"{IN_HOST},zero=3,offload=cpu,offload_param=cpu", "fp32"),
    ],
)
def test_steps_on_a_gpu_are_ordered_and_train_like_the_cpu(layout, dtype):
    most = []

    def put(self, x, microbatch, put=WaitingTensors.put):
        waiting = put(self, x, microbatch)
        most.append(self.nbytes)
        return waiting

    with patch.object(WaitingTensors, "put", put):
        on_gpu = train(layout, "cuda", dtype)
    on_cpu = train(layout, "cpu", dtype)
    assert not on_gpu.problems
    found, limit = (
        difference(on_gpu.merged, on_cpu.merged, on_cpu.model),
        TOLERANCE[dtype],
    )
    assert found.loss <= limit.loss and found.grad_norm <= limit.grad_norm, found
    inputs = 24 * 32 * (2 if dtype == "bf16" else 4) // (2 if "parts" in layout else 1)
    # 3 blocks on one rank; on the first of two stages 2 blocks, or 1, of two micro-batches
    assert max(most) == inputs * (3 if "pp=2" not in layout else 4)
    # Buffers are used again: two steps take what one plan has.
    assert max(on_gpu.page_locked("host/waiting_tensors.py")) == max(most)
    if "offload" not in layout:
        assert all(
            of_rank.total() == 2 for of_rank in on_gpu.waits()
        )  # the one wait of each step
        beside = {
            what
            for order in on_gpu.orders
            for stream, what in order.launches
            if stream != DEFAULT
        }
        assert "copy" in beside


def leave_at_once(waiting):
    """`WaitingTensor.leave` without the wait."""
    x, waiting.near = waiting.near, None
    return x


@pytest.mark.parametrize(
    "owner, name, left_out",
    [
        (Mark, "wait", lambda mark: None),
        (SideStream, "behind_current", SideStream.apart),
        (WaitingTensor, "leave", leave_at_once),
    ],
)
def test_a_wait_that_is_left_out_is_found(owner, name, left_out):
    with fake_cuda(), FakeGpu() as gpu, patch.object(owner, name, left_out):
        keep, batch = InputKeeper(solo("tp"), WaitingTensors()), batch_of(Ledger())
        agains = [
            keep(torch.full((4,), float(i), device="cuda").mul_(2), batch)
            for i in range(3)
        ]
        for i in (2, 1, 0):
            agains[i]().mul_(2)
    assert gpu.order.problems


@pytest.mark.parametrize("leave", [WaitingTensor.leave, leave_at_once])
def test_buffers_of_a_backward_that_ends_early_are_used_again_in_order(leave):
    """An input is on its way back when its buffer gets another: a wait that is left out is found."""
    with (
        fake_cuda(),
        FakeGpu() as gpu,
        patch.object(WaitingTensor, "leave", leave),
    ):
        keep = InputKeeper(solo("tp"), WaitingTensors())
        for taken in ((2,), (2, 1, 0)):
            batch = batch_of(Ledger())
            agains = [
                keep(torch.full((4,), float(i), device="cuda").mul_(2), batch)
                for i in range(3)
            ]
            values = [agains[i]().tolist() for i in taken]
            agains.clear()
        assert values == [[4.0] * 4, [2.0] * 4, [0.0] * 4]
        assert sum(block.taken for block in gpu.page_locked) == 3 * 16
    assert bool(gpu.order.problems) == (leave is leave_at_once)


def test_the_input_before_comes_back_while_a_block_is_at_work():
    with fake_cuda(), FakeGpu() as gpu:
        keep = InputKeeper(solo("tp"), WaitingTensors())
        batches = [batch_of(Ledger()) for _ in range(2)]
        inputs = [
            [torch.full((4,), 10.0 * m + i, device="cuda") for i in range(3)]
            for m in range(2)
        ]
        agains = [
            [keep(x, batch) for x in of_batch]
            for of_batch, batch in zip(inputs, batches)
        ]
        del inputs
        near = lambda: [
            [again.args[0].args[0].near is not None for again in of_batch]
            for of_batch in agains
        ]
        assert near() == [[False] * 3, [False, False, True]]  # the last has not left
        assert agains[1][2]().tolist() == [12.0] * 4
        assert near() == [[False] * 3, [False, True, False]]  # the one before is coming
        assert agains[0][2]().tolist() == [2.0] * 4  # another micro-batch
        assert near() == [[False, True, False], [False, True, False]]
        assert [agains[m][i]().tolist()[0] for i in (1, 0) for m in (0, 1)] == [
            1.0,
            11.0,
            0.0,
            10.0,
        ]
        assert near() == [[False] * 3] * 2 and keep.waiting.nbytes == 6 * 16
        agains.clear()
        assert not keep.waiting.nbytes
    assert not gpu.order.problems


# ------------------------------------------------------------------ options
@pytest.mark.parametrize(
    "flags, ranks, effects",
    [
        (["--recompute-granularity", "full"], 2, (True, True)),
        ([], 2, (False, False)),
        (["--recompute-granularity", "full"], 1, (True, False)),
        (["--recompute-granularity", "full", "--sequence-parallel"], 2, (True, False)),
    ],
)
def test_a_deepspeed_json_sets_how_inputs_are_kept_if_layers_are_recomputed(
    flags, ranks, effects, tmp_path
):
    path = tmp_path / "ds.json"
    block = {"partition_activations": True, "cpu_checkpointing": True}
    path.write_text(json.dumps({"activation_checkpointing": block}))
    config = parse(
        [
            *JOB,
            *flags,
            "--deepspeed_config",
            str(path),
            *f"--seq-length 32 --micro-batch-size 1 --tensor-model-parallel-size {ranks}".split(),
        ],
        world_size=ranks,
    )
    assert (
        config.train.checkpoint_in_cpu,
        config.train.distribute_saved_activations,
    ) == effects
    assert len(config.without_effect) == effects.count(False)
    assert "has no effect" in kept_inputs_text(config, "cpu") or not effects[0]
    assert ("host memory" in kept_inputs_text(config, "cuda")) == effects[0]


# ------------------------------------------------------------------ plans
def plan(device: str, *more: str, ranks: int = 1):
    job = [
        *JOB,
        *(
            "--seq-length 256 --micro-batch-size 2 --global-batch-size 2 --bf16 --hidden-dropout 0 "
            "--attention-dropout 0 --tokenizer-type NullTokenizer --recompute-granularity full"
        ).split(),
        *more,
    ]
    return plan_world(parse(job, world_size=ranks), 0, device).rank_plan(0)


def test_a_plan_for_gpus_moves_the_inputs_to_the_host_and_two_stay():
    away, whole = plan("cuda", "--checkpoint-in-cpu"), plan("cuda")
    inputs = 256 * 2 * 64 * 2
    assert away.in_host == 3 * inputs and not whole.in_host
    assert whole.kept - away.kept == 3 * inputs
    # one that is leaving or coming, in addition to that at work
    assert 0 <= away.at_work - whole.at_work <= 2 * inputs
    on_cpu = plan("cpu", "--checkpoint-in-cpu")
    assert not on_cpu.in_host and on_cpu.peak == plan("cpu").peak


def test_parts_cost_a_gather_of_each_input():
    ranks = RANKS["tp"]
    parts, whole = (
        plan("cuda", *ranks[1], *more, ranks=2)
        for more in (["--distribute-saved-activations"], [])
    )
    inputs = 256 * 2 * 64 * 2
    assert whole.kept - parts.kept == 3 * inputs // 2
    key = ("all_gather", "tp", 2)
    assert parts.traffic.calls[key] - whole.traffic.calls.get(key, 0) == 3
    assert parts.traffic.bytes[key] - whole.traffic.bytes.get(key, 0) == 3 * inputs
