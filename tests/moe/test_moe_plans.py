"""Plans of models with experts: activations to the byte where experts are padded; closed forms of parameters,
state, all-to-all and FLOPs."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.dry_run import plan_text
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.models import MODELS, build_stage
from megatron_ds.moe.capacity import Capacity
from megatron_ds.mpu.fake_group import FakeTransport, fake_mesh
from megatron_ds.mpu.group import DONE
from megatron_ds.pipeline.stage import Stage
from megatron_ds.planning.fake_stages import StageRunner, without_memory
from megatron_ds.planning.flops import layers_of, model_flops
from megatron_ds.planning.layer_costs import LayerCost, estimated_times
from megatron_ds.planning.run_model import DTYPES, boundary_shape, describe_layers
from megatron_ds.planning.run_plan import PipelineShape, plan_run
from tests.harness.alive_bytes import AliveBytes

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2)]

E, K, H, F, SHARED, S, V = 8, 2, 32, 24, 40, 16, 96
JOB = (
    f"--num-layers 4 --hidden-size {H} --num-attention-heads 4 --seq-length {S} "
    f"--vocab-size {V} --make-vocab-size-divisible-by 1 --lr 1 --train-iters 1 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --ffn-hidden-size 88 "
    f"--untie-embeddings-and-output-weights --num-experts {E} --moe-router-topk {K} "
    f"--moe-ffn-hidden-size {F} --moe-layer-freq [0,1,1,1] "
    f"--moe-shared-expert-intermediate-size {SHARED}"
).split()
PADDED = ["--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"]
PLACES = 5  # 1.25 · 2 · 16 / 8
ATTENTION, NORMS = 4 * H * H, 2 * H
EXPERTS, DENSE_OF_MOE = E * 3 * H * F, E * H + 3 * H * SHARED + ATTENTION + NORMS
DENSE = 3 * H * 88 + ATTENTION + NORMS


def config_of(*flags: object, ranks: int = 1):
    return parse([*JOB, *map(str, flags)], world_size=ranks)


# ------------------------------------------------------------------ activations
@pytest.mark.parametrize(
    "tp, ep, samples, flags",
    [
        (1, 1, 3, []),
        (1, 4, 1, ["--bf16"]),
        (2, 2, 2, []),
        (2, 2, 3, ["--sequence-parallel", "--bf16"]),
        (2, 1, 1, ["--sequence-parallel", "--moe-capacity-scope", "micro-batch"]),
        (2, 2, 2, ["--sequence-parallel", "--recompute-granularity", "full"]),
    ],
)
def test_padded_experts_keep_what_was_planned_to_the_byte(
    tp, ep, samples, flags, monkeypatch
):
    """A dense block and one with experts; one process simulates peers that have the same tokens."""
    monkeypatch.setattr(FakeTransport, "all_gather", gathered)
    config = config_of(
        *PADDED,
        *flags,
        "--micro-batch-size",
        samples,
        "--tensor-model-parallel-size",
        tp,
        "--expert-model-parallel-size",
        ep,
        ranks=tp * ep,
    )
    mesh, layers = fake_mesh(config.grid(), tp * ep - 1, "cpu"), slice(1, 3)
    assert kept(config, mesh, layers) == planned(config, mesh, layers) > 0


def gathered(transport, out, tensor):
    """What all ranks have, where they have what this one has: numbers of experts must be such."""
    out.view(transport.size, -1).copy_(tensor.view(1, -1).expand(transport.size, -1))
    return DONE


def kept(config, mesh, layers: slice) -> int:
    modules = build_stage(describe_layers(config, mesh)[layers])
    for p in modules.parameters():
        torch.nn.init.normal_(p, std=0.2)
    stage, batches = (
        Stage(0, list(modules), is_first=False, is_last=False, loss=None),
        [],
    )
    with AliveBytes() as alive:
        for k in range(2):  # the second: what a rank holds once is there already
            batches.append(MODELS["gpt"].data.blank(config.train.micro_batch_size, S))
            given = alive.now()
            x = torch.randn(boundary_shape(config)).to(
                DTYPES[config.optimizer.params_dtype]
            )
            stage.forward(k, batches[-1], x, 1.0)
            del x
            measured = alive.now() - given
    return measured


def planned(config, mesh, layers: slice) -> int:
    plan = plan_run(config, describe_layers(config, mesh))
    plan = replace(
        plan,
        bounds=(0, layers.start, layers.stop, len(plan.layers)),
        shape=PipelineShape("1f1b", 3, 1),
    )
    with without_memory("cpu") as where:
        [stage] = StageRunner(
            config, mesh, plan, where, frozenset(), only_forward=True
        ).stages_of(1)
    return stage.run.kept


# ------------------------------------------------------------------ closed forms
@pytest.mark.parametrize(
    "tp, ep, sequence_parallel", [(1, 4, False), (2, 2, True), (2, 2, False)]
)
def test_the_all_to_all_of_padded_experts_is_that_of_the_closed_form(
    tp, ep, sequence_parallel
):
    """Each of forward and backward sends E C rows there and back, of them (ep-1)/ep to other ranks, and each
    tensor-parallel rank sends its columns."""
    config = config_of(
        *PADDED,
        "--micro-batch-size",
        3,
        "--global-batch-size",
        6 * ep,
        "--bf16",
        "--tensor-model-parallel-size",
        tp,
        "--expert-model-parallel-size",
        ep,
        *(["--sequence-parallel"] if sequence_parallel else []),
        ranks=tp * ep,
    )
    traffic = plan_world(config, 0, "cpu").rank_plan(0).traffic
    moe_layers, microbatches = 3, 2
    rows = 3 * E * PLACES * (ep - 1) // ep
    assert (
        traffic.bytes["all_to_all_v", "ep", ep]
        == moe_layers * microbatches * 2 * 2 * rows * H // tp * 2
    )
    assert ("all_to_all", "ep", ep) not in traffic.bytes


def test_a_plan_without_capacity_has_equal_loads_of_the_experts():
    """T k rows, of which (ep-1)/ep go to other ranks, and the numbers of rows: 8 bytes for each expert."""
    config = config_of(
        "--micro-batch-size", 2, "--expert-model-parallel-size", 4, ranks=4
    )
    plan = plan_world(config, 1, "cpu")
    traffic, tokens = plan.rank_plan(1).traffic, 2 * S
    assert (
        traffic.bytes["all_to_all_v", "ep", 4] == 3 * 4 * (tokens * K * 3 // 4) * H * 4
    )
    assert traffic.bytes["all_to_all", "ep", 4] == 3 * 8 * E
    text = plan_text(plan, [])
    assert (
        "for a micro-batch: 64, with equal loads of the experts; the most for any data is 256"
        in text
    )


@pytest.mark.parametrize(
    "tp, flags", [(1, []), (2, []), (2, ["--sequence-parallel"])], ids=str
)
@pytest.mark.parametrize("scope", ["sequence", "micro-batch"])
def test_a_plan_below_the_demand_has_the_rows_of_the_capacity(tp, flags, scope):
    """At equal demand each expert keeps its capacity, ceil(0.6 · 2 · tokens / 8), of each sequence or of the
    micro-batch: 3 of 16 tokens, or 5 of 32."""
    config = config_of(
        "--micro-batch-size",
        2,
        "--expert-model-parallel-size",
        2,
        "--moe-capacity-scope",
        scope,
        "--moe-expert-capacity-factor",
        0.6,
        "--tensor-model-parallel-size",
        tp,
        *flags,
        ranks=2 * tp,
    )
    plan = plan_world(config, 1, "cpu")
    rows = E * (2 * 3 if scope == "sequence" else 5)
    sent = rows // (tp if flags else 1) // 2  # to the other of two ranks
    assert (
        plan.rank_plan(1).traffic.bytes["all_to_all_v", "ep", 2] == 3 * 4 * sent * H * 4
    )
    assert (
        f"for a micro-batch: {rows}, with equal loads of the experts; the most for any data is {rows}"
        in (plan_text(plan, []))
    )
    enough = replace(config.model, moe_expert_capacity_factor=1.7)
    assert Capacity.of(enough, E, True).planned(1, S) == K * S


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_of_experts_is_divided_over_expert_data_ranks(zero):
    """Per element 2 bytes of weight, 4 of gradient, 12 of master and moments, which the stages divide in
    turn: for experts by 2 ranks, for the rest by 8. Padding of buckets is less than a twentieth."""
    config = config_of(
        "--micro-batch-size",
        1,
        "--bf16",
        "--expert-model-parallel-size",
        4,
        "--zero-stage",
        zero,
        *(["--stage3-param-persistence-threshold", 0] if zero == 3 else []),
        ranks=8,
    )
    state = plan_world(config, 5, "cpu").rank_plan(5).state
    dense, experts = DENSE + 3 * DENSE_OF_MOE + H + 2 * V * H, 3 * EXPERTS // 4
    held = lambda size, stage: (
        size
        * (dense / (8 if zero >= stage else 1) + experts / (2 if zero >= stage else 1))
    )
    assert state.parameters == pytest.approx(held(2, 3), rel=0.05)
    assert state.gradients == pytest.approx(held(4, 2), rel=0.05)
    assert state.masters + state.optimizer == pytest.approx(held(12, 1), rel=0.05)


def test_parameters_in_total_and_of_a_token_are_those_of_the_closed_form():
    plan = plan_world(
        config_of("--micro-batch-size", 1, "--expert-model-parallel-size", 2, ranks=4)
    )
    whole = DENSE + 3 * (DENSE_OF_MOE + EXPERTS) + H + 2 * V * H
    assert plan.parameters == whole and plan.rank_plan(3).of_experts == 3 * EXPERTS // 2
    text = plan_text(plan, [])
    assert (
        f"a token uses {whole - 3 * EXPERTS * (E - K) // E:,} of the parameters" in text
    )
    assert (
        "8 in 3 of 4 blocks, 2 of them for a token, 4 on a rank (expert-parallel 2 × expert-data"
        in text
    )


def test_flops_count_the_experts_that_a_token_chooses():
    """Forward: 8 h² a token of attention's matrices, 6 h f of gated experts; and 2 s² h of scores; thrice."""
    model = config_of("--micro-batch-size", 1).model
    scores = 2 * S * S * H  # causal: half of q kᵀ and of p v
    block = lambda width: S * (8 * H * H + 6 * H * width) + scores
    moe = block(K * F + SHARED) + S * 2 * H * E
    layers = layers_of(model)
    first_and_third = {"decoder.layers.0", "decoder.layers.2"}
    dropping = [
        replace(layer, drops_tokens=layer.name in first_and_third) for layer in layers
    ]
    assert model_flops(layers, 5, S, V) == 5 * 3 * (block(88) + 3 * moe + 2 * S * H * V)
    assert model_flops(dropping, 1, S, V, S) == model_flops(layers, 1, S, V)
    whole, drops = (
        model_flops(layers, 1, S, V),
        model_flops(dropping, 1, S, V, S // 2),
    )
    less = lambda kind: next(
        layer.flops(S, V).total - layer.flops(S // 2, V).total
        for layer in layers_of(model)
        if layer.kind == kind
    )
    assert whole - drops == less("block") + less("moe_block")


def test_a_pyramid_has_a_kind_for_each_number_of_experts():
    config = config_of(
        "--micro-batch-size",
        1,
        "--num-experts",
        2,
        8,
        8,
        "--pipeline-cut",
        "parameters",
    )
    layers = layers_of(config.model)
    assert [layer.kind for layer in layers if layer.is_block] == [
        "block",
        "moe_block_2",
        "moe_block_8",
        "moe_block_8",
    ]
    costs = dict(
        zip((layer.name for layer in layers), plan_run(config, layers).layer_costs)
    )
    assert costs["decoder.layers.2"].forward - costs[
        "decoder.layers.1"
    ].forward == 6 * (3 * H * F + H)
    assert isinstance(estimated_times(config, layers).layers["moe_block_2"], LayerCost)


def test_a_cut_balances_dense_blocks_and_blocks_with_experts():
    """The cut is the one of all into three whose costliest stage costs the least, by the closed form."""
    flags = [
        *(
            "--num-layers 9 --moe-layer-freq ([0]*6+[1]*3) --moe-ffn-hidden-size 40 "
            "--ffn-hidden-size 16"
        ).split(),
        "--micro-batch-size",
        1,
        "--pipeline-model-parallel-size",
        3,
    ]
    plan = plan_world(config_of(*flags, ranks=3))
    block = lambda width: S * (8 * H * H + 6 * H * width) + 2 * S * S * H
    costs = [
        0,
        *[block(16)] * 6,
        *[block(K * 40 + SHARED) + S * 2 * H * E] * 3,
        0,
        S * 2 * H * V,
    ]
    best = min(
        max(sum(costs[:i]), sum(costs[i:j]), sum(costs[j:]))
        for i in range(1, len(costs))
        for j in range(i + 1, len(costs))
    )
    assert max(plan.run.stage_cost_shares()) == pytest.approx(best / sum(costs))
    assert len(plan.stages[0].layers) > len(plan.stages[1].layers)


def test_stages_of_one_sort_run_once_and_have_the_metrics_of_their_own_layers():
    flags = [
        *"--num-layers 12 --moe-layer-freq 1".split(),
        "--pipeline-layout",
        "Et|" + "t|" * 10 + "tL",
        "--pipeline-model-parallel-size",
        12,
        "--micro-batch-size",
        1,
        "--moe-aux-loss-coeff",
        "0.01",
    ]
    plan = plan_world(config_of(*flags, ranks=12))
    assert [stage.index for stage in plan.stages if stage.ran] == [0, 1, 11]
    names = set().union(*(stage.run.metrics for stage in plan.stages))
    assert {name for name in names if name.endswith("max load")} == {
        f"decoder.layers.{i} max load" for i in range(12)
    }
