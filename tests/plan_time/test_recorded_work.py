"""What a plan records of a stage is what the model's formulas count, in every layout, and what kernels state is what
torch's operations do."""

import math
from collections import Counter

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.world_plan import WorldPlan, plan_world
from megatron_ds.extensions.plan_time.recorded_work import (
    Awaited,
    Begun,
    Call,
    WorkRecorder,
)
from megatron_ds.mpu.group import Traffic
from megatron_ds.ops.kernel_table import OPERATIONS, Operation, load_kernels
from megatron_ds.ops.work import CallWork, Product, each_stands_for, report
from megatron_ds.pipeline.instruction import Op

pytestmark = pytest.mark.plan

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 16 --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0.1 --mock-data "
    "--lr 1e-4 --train-iters 1"
)
SWIGLU = (
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2"
TWO_TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
LATENTS = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24 "
    "--context-parallel-size 2 --cp-comm-type all_gather --disable-bias-linear"
)
# Flags, ranks and devices for which the kernels compute what the formulas count.
CASES = {
    "dense": ("", 1, "cuda cpu"),
    "tensor": ("--tensor-model-parallel-size 2", 2, "cuda cpu"),
    "sequence": (TWO_TENSOR, 2, "cuda cpu"),
    "pipeline": ("--pipeline-model-parallel-size 2", 2, "cuda cpu"),
    "split backward": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        2,
        "cuda cpu",
    ),
    "grouped queries": (SWIGLU, 1, "cuda cpu"),
    "window": ("--window-size 31 0", 1, "cuda"),
    "full recomputation": ("--recompute-granularity full", 1, "cuda cpu"),
    "selective recomputation": ("--recompute-granularity selective", 1, "cuda cpu"),
    "ring": ("--context-parallel-size 2", 2, "cuda cpu"),
    "all to all": ("--context-parallel-size 2 --cp-comm-type a2a", 2, "cuda cpu"),
    "gathered": ("--context-parallel-size 2 --cp-comm-type all_gather", 2, "cuda cpu"),
    "latents": (LATENTS, 2, "cuda cpu"),
    "latents of a sequence": (f"{LATENTS} {TWO_TENSOR}", 4, "cuda"),
    "latents, fully recomputed": (
        f"{LATENTS} --recompute-granularity full",
        2,
        "cuda cpu",
    ),
    "latents, selectively recomputed": (
        f"{LATENTS} --recompute-granularity selective",
        2,
        "cuda cpu",
    ),
    "experts": (EXPERTS, 1, "cuda cpu"),
    "divided experts": (f"{EXPERTS} --expert-model-parallel-size 2", 2, "cuda cpu"),
    "grouped experts": (f"{EXPERTS} --moe-grouped-gemm --bf16", 1, "cuda cpu"),
    "experts of tensor ranks": (f"{EXPERTS} {TWO_TENSOR}", 2, "cuda cpu"),
    "tiles": ("--tiled-mlp 2", 1, "cuda cpu"),
}


def planned(flags: str, world: int, device: str) -> WorldPlan:
    """Return the recorded plan of a small model."""
    config = parse(f"{SMALL} {flags}".split(), world_size=world)
    return plan_world(config, 0, device, recorder=WorkRecorder)


def recorded_flops(plan: WorldPlan) -> float:
    """FLOPs of one sequence on all ranks that share it."""
    of_micro_batch = sum(sum(stage.run.work.flops.values()) for stage in plan.stages)
    shared = plan.grid.tp * plan.grid.cp
    return of_micro_batch * shared / plan.config.train.micro_batch_size


def formula_flops(plan: WorldPlan) -> float:
    """FLOPs of one sequence by the formulas of the layers, with what is recomputed."""
    config = plan.config
    layers = [layer for stage in plan.stages for layer in stage.layers]
    return plan.again_flops + sum(
        layer.flops(config.model.seq_length, config.padded_vocab_size).total
        for layer in layers
    )


@pytest.mark.parametrize(
    "name, device",
    [(name, device) for name, case in CASES.items() for device in case[2].split()],
)
def test_recorded_flops_are_those_of_the_formulas(name, device):
    flags, world, _ = CASES[name]
    plan = planned(flags, world, device)
    assert recorded_flops(plan) == pytest.approx(formula_flops(plan), rel=1e-12)


def test_frozen_weights_and_unneeded_gradients_are_not_recorded():
    plan = planned("--lora-rank 4", 1, "cuda")
    config = plan.config
    rows = config.model.seq_length
    h = config.model.hidden_size
    # Nothing before the first adapter is trained, so its layer needs no gradient of its input.
    unneeded = 2 * rows * h * (3 * h + 4)
    assert recorded_flops(plan) == pytest.approx(formula_flops(plan) - unneeded)


def test_chunks_of_the_head_are_computed_twice():
    plan = planned("--cross-entropy-chunks 4", 1, "cuda")
    config = plan.config
    head = (
        2
        * config.model.seq_length
        * config.model.hidden_size
        * config.padded_vocab_size
    )
    assert recorded_flops(plan) == pytest.approx(formula_flops(plan) + head)


@pytest.mark.parametrize("name", ["dense", "tensor", "split backward"])
def test_recomputed_calls_have_the_backwards_of_the_first_time_alone(name):
    flags, world, _ = CASES[name]
    kept = planned(flags, world, "cuda")
    recomputed = planned(f"{flags} --recompute-granularity full", world, "cuda")
    assert _backwards(kept) == _backwards(recomputed)
    assert _backwards(kept)["layer_norm backward"] > 4


def _backwards(plan: WorldPlan) -> Counter[str]:
    """Return how often each kernel's backward is recorded."""
    return Counter(
        event.name
        for stage in plan.stages
        for events in stage.run.work.phases.values()
        for event in events
        if isinstance(event, Call) and event.name.endswith(" backward")
    )


def test_messages_are_those_of_the_plans_traffic():
    plan = planned(f"{EXPERTS} {TWO_TENSOR}", 2, "cuda")
    stage = plan.stages[0].run
    begun = [
        event
        for events in stage.work.phases.values()
        for event in events
        if isinstance(event, Begun)
    ]
    found: dict[tuple, int] = {}
    for event in begun:
        key = event.operation, event.axes, event.size
        found[key] = found.get(key, 0) + event.nbytes
    assert found == dict(stage.traffic.bytes)


def test_a_wait_that_comes_later_is_recorded_behind_what_overlaps():
    """The gradient of a column-parallel layer's input is summed while that of its weight is computed."""
    plan = planned(TWO_TENSOR, 2, "cuda")
    events = plan.stages[0].run.work.of(Op.B)
    overlapped = 0
    for at, event in enumerate(events):
        if isinstance(event, Begun):
            wait = events.index(Awaited(event.number), at)
            between = events[at + 1 : wait]
            overlapped += any(isinstance(e, Call) and e.work.products for e in between)
    assert overlapped >= plan.config.model.num_layers


# ---- What is registered elsewhere.


def test_an_operation_of_a_user_is_recorded_by_its_operations_of_torch(doubled):
    [call] = _recorded(lambda: doubled(torch.empty(4, 8, device="meta")))
    assert (call.name, call.implementation) == ("add", "torch")
    assert call.work.nbytes == 3 * 4 * 8 * 4


def test_a_kernel_of_a_user_reads_its_tensors_and_writes_one_unless_it_states_more(
    doubled,
):
    doubled.kernel("mine", devices=("meta",))(torch.empty_like)
    [call] = _recorded(lambda: doubled(torch.empty(4, 8, device="meta")))
    assert (call.name, call.implementation) == ("doubled_by_a_user", "mine")
    assert call.work.nbytes == 2 * 4 * 8 * 4

    doubled.states_work()(lambda x: CallWork((Product(1, 4, 8, 16),)))
    [stated] = _recorded(lambda: doubled(torch.empty(4, 8, device="meta")))
    assert stated.work.flops == 2 * 4 * 8 * 16


@pytest.fixture
def doubled():
    """An operation that no file of the package has."""

    @Operation
    def doubled_by_a_user(x: torch.Tensor) -> torch.Tensor:
        return x + x

    yield doubled_by_a_user
    del OPERATIONS["doubled_by_a_user"]


def test_a_call_that_stands_for_several_counts_as_so_many():
    def several():
        with each_stands_for(2.5):
            report("products", "mine", CallWork((Product(2, 3, 4, 5),), nbytes=10))

    [call] = _recorded(several)
    assert call.work == CallWork((Product(5, 3, 4, 5),), nbytes=25)


def _recorded(function) -> list[Call]:
    recorder = WorkRecorder(Traffic())
    with recorder.phase(Op.F):
        function()
    return [e for e in recorder.stage_work().of(Op.F) if isinstance(e, Call)]


load_kernels("cuda")
STATED = sorted(
    name
    for name, operation in OPERATIONS.items()
    if operation.examples and any(i.is_opaque for i in operation.implementations)
)


@pytest.mark.parametrize("name", STATED)
def test_kernels_state_the_flops_of_torch(name):
    """Forward and backward: what the statement of an operation has is what its torch operations are seen to do."""
    operation = OPERATIONS[name]
    for make in operation.examples:
        arguments = make(8, 32, torch.float32, torch.device("cpu"))
        recorder = WorkRecorder(Traffic())
        with recorder.phase(Op.F):
            result = operation.in_torch(*arguments)
        with recorder.phase(Op.B):
            for tensor in _differentiable(result):
                tensor.backward(torch.ones_like(tensor), retain_graph=True)
        seen = recorder.stage_work().flops
        assert seen[Op.F] == pytest.approx(operation.forward_work(*arguments).flops)
        if seen[Op.B]:
            backward = operation.backward_work(*arguments)
            assert seen[Op.B] == pytest.approx(backward.flops)


def _differentiable(result) -> list[torch.Tensor]:
    results = result if isinstance(result, (list, tuple)) else (result,)
    return [
        r
        for r in results
        if isinstance(r, torch.Tensor) and r.requires_grad and math.prod(r.shape)
    ]
