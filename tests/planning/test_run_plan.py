"""From flags to the shape of the pipeline and to the cut, as users of Megatron and DeepSpeed write them."""

import json
from dataclasses import replace

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS
from megatron_ds.mpu.group import solo
from megatron_ds.pipeline.instruction import Op
from megatron_ds.planning.layer_costs import (
    SOURCE,
    LayerCost,
    Times,
    read_costs,
    time_layers,
    time_transfer,
    write_costs,
)
from megatron_ds.planning.run_plan import (
    RULES,
    PipelineShape,
    pipeline_shape,
    plan_run,
    plan_schedule,
)
from megatron_ds.training.pretrain import KNOWN_NAMES
from tests.harness.model_runs import context_of
from tests.harness.operation_clock import layers_timed_by_operations

pytestmark = pytest.mark.plan

# Workload S of the benchmarks: the head costs as much as one or two of the six layers.
SIZES = "--hidden-size 384 --num-attention-heads 6 --seq-length 256 --vocab-size 8192".split()
RUN = ["--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "5", "--mock-data"]


def config_of(*flags, layers=6, world=4, batch=16):
    job = ["--num-layers", str(layers), *SIZES, *RUN, "--global-batch-size", str(batch)]
    return parse(
        [*job, *map(str, flags)], world_size=world, known=KNOWN_NAMES, rules=RULES
    )


def plan_of(config, measured=None):
    return plan_run(config, MODELS["gpt"](config.model, context_of()), measured)


PP, CHUNKS, THICK = (
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    "flags, shape",
    [
        ((PP, 2), ("1f1b", 2, 1)),
        ((PP, 2, THICK, 3), ("1f1b", 2, 1)),
        ((PP, 2, THICK, 1), ("interleaved", 2, 3)),
        ((PP, 2, CHUNKS, 2), ("interleaved", 2, 2)),
        ((PP, 2, "--pipeline-schedule", "interleaved"), ("interleaved", 2, 2)),
        (
            (PP, 2, "--pipeline-schedule", "interleaved_1f1b", CHUNKS, 3),
            ("interleaved", 2, 3),
        ),
        ((PP, 2, "--pipeline-layout", "2,2,1,1"), ("interleaved", 2, 2)),
        (
            (PP, 2, "--pipeline-model-parallel-layout", "Et|(t|)*4tL"),
            ("interleaved", 2, 3),
        ),
        ((PP, 4, "--enable-zbh1-pipeline"), ("zb-h1", 4, 1)),
        ((PP, 4, "--enable-zbh1-exact-semantics"), ("zb-h1", 4, 1)),
        ((PP, 2, "--pipeline-schedule", "zb-v"), ("zb-v", 2, 2)),
        (
            (PP, 2, "--pipeline-schedule", "zb-v", "--pipeline-layout", "2,2,2,0"),
            ("zb-v", 2, 2),
        ),
        (
            (
                PP,
                4,
                "--pipeline-schedule",
                "zb-v",
                "--pipeline-layout",
                "E|t|t|t|t|t|t|L",
            ),
            ("zb-v", 4, 2),
        ),
        (("--pipeline-schedule", "gpipe"), ("gpipe", 1, 1)),
    ],
)
def test_flags_of_megatron_and_deepspeed_name_schedule_and_stages(flags, shape):
    assert pipeline_shape(config_of(*flags)) == PipelineShape(*shape)


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            (PP, 2, CHUNKS, 2, THICK, 1),
            "both set the number of stages per rank. Give only one.",
        ),
        (
            (CHUNKS, 2),
            "but --pipeline-model-parallel-size 1 (default). Remove it, or use --pipeline-model-parallel-size 2",
        ),
        (
            (PP, 2, THICK, 2),
            "is not a multiple of --pipeline-model-parallel-size 2 × "
            "--num-layers-per-virtual-pipeline-stage 2 = 4: every rank holds the same number of stages. "
            "Use --num-layers-per-virtual-pipeline-stage 1 or 3",
        ),
        (
            (PP, 2, CHUNKS, 4),
            "--num-layers 6 is less than --pipeline-model-parallel-size 2 × "
            "--num-virtual-stages-per-pipeline-rank 4: each stage needs at least one layer. Use at most 6 stages in "
            "all",
        ),
        (
            (PP, 4, "--pipeline-schedule", "zb-v"),
            "--num-layers 6 is less than --pipeline-model-parallel-size 4 × "
            "2, the stages on each rank with --pipeline-schedule zb-v: each stage needs at least one layer. Use "
            "--pipeline-model-parallel-size 1, 2 or 3, --pipeline-schedule 1f1b, or --pipeline-layout",
        ),
        (
            (PP, 4, "--pipeline-schedule", "interleaved"),
            "4 × 2, the stages on each rank with --pipeline-schedule "
            "interleaved: each stage needs at least one layer. Use --pipeline-model-parallel-size 1, 2 or 3",
        ),
        (
            (PP, 2, "--pipeline-schedule", "1f1b", CHUNKS, 2),
            "schedule '1f1b' does not support 2 chunks of the model per rank. "
            "Valid: 1. Schedules for 2 chunks: interleaved, zb-v",
        ),
        (
            (PP, 2, "--pipeline-schedule", "zb-v", CHUNKS, 3),
            "schedule 'zb-v' does not support 3 chunks",
        ),
        (
            (PP, 2, "--pipeline-layout", "2,2,2"),
            "--pipeline-layout 2,2,2 has 3 stages and 6 layers, but there are",
        ),
        (
            (PP, 8, "--pipeline-layout", "6"),
            "Use for instance --pipeline-layout E|t|t|t|t|t|t|L.",
        ),
        (
            (PP, 7, "--pipeline-layout", "6"),
            "Use for instance --pipeline-layout E|t|t|t|t|t|t.",
        ),
        ((PP, 9, "--pipeline-layout", "6"), "Use at most 8 stages in all: "),
        (
            (PP, 2, CHUNKS, 3, "--pipeline-layout", "2,2,1,1"),
            "for instance --pipeline-layout 1,1,1,1,1,1.",
        ),
        ((PP, 2, "--pipeline-schedule", "zbv"), "did you mean 'zb-v'?"),
        (
            (PP, 2, "--virtual-pipeline-model-parallel-size", 2),
            "write --num-virtual-stages-per-pipeline-rank",
        ),
        (
            (PP, 2, "--pipeline-layout", "3,3", "--pipeline-cut", "uniform"),
            "both assign the layers to stages. Give only one.",
        ),
        (
            (PP, 2, "--pipeline-costs-path", "t.json"),
            "has no effect without --pipeline-cut measured",
        ),
        (
            (PP, 2, "--pipeline-memory-limit", 3),
            "--pipeline-memory-limit 3 is for --pipeline-schedule zb-auto; 1f1b has no use",
        ),
        (
            (PP, 2, GROUP, 4),
            f"{GROUP} 4 is for --pipeline-schedule interleaved; 1f1b has no use for it",
        ),
        (
            (PP, 2, CHUNKS, 2, GROUP, 1),
            "groups of 1 micro-batches on 2 pipeline ranks: rank 0 would wait",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(flags, words):
    with pytest.raises(ConfigError) as caught:
        config_of(*flags)
    assert words in str(caught.value)


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_a_schedule_may_have_as_many_stages_as_layers_and_no_more(schedule):
    assert (
        pipeline_shape(
            config_of(PP, 4, "--pipeline-schedule", schedule, layers=8)
        ).num_stages
        == 8
    )
    with pytest.raises(
        ConfigError, match="Use --pipeline-schedule 1f1b, or --pipeline-layout"
    ):
        config_of("--pipeline-schedule", schedule, layers=1)


def test_what_is_wrong_with_several_flags_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        config_of(
            PP, 2, CHUNKS, 4, "--pipeline-costs-path", "t.json", "--num-query-groups", 4
        )
    assert str(caught.value).startswith("3 problems in the configuration")


def test_the_pipeline_block_of_deepspeed_says_how_many_stages_and_what_they_are_cut_by(
    tmp_path,
):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"pipeline": {"stages": 2, "partition": "parameters"}}))
    config = config_of("--deepspeed_config", file)
    assert (
        config.parallel.pipeline_model_parallel_size == 2
        and config.parallel.pipeline_cut == "parameters"
    )
    file.write_text(json.dumps({"pipeline": {"stages": "auto", "partition": "best"}}))
    assert pipeline_shape(config_of(PP, 4, "--deepspeed_config", file)).size == 4
    file.write_text(
        json.dumps({"pipeline": {"seed_layers": True, "partition": "type:Block"}})
    )
    with pytest.raises(
        ConfigError, match='"pipeline.seed_layers" is not supported(.|\n)*type:Block'
    ):
        config_of("--deepspeed_config", file)


def blocks_of(plan):
    return [
        sum(name.startswith("decoder.layers") for name in plan.stage_names(s))
        for s in range(plan.shape.num_stages)
    ]


@pytest.mark.parametrize(
    "flags, blocks",
    [
        ((PP, 2), [4, 2]),  # the head counts as 1.7 layers
        ((PP, 2, "--pipeline-cut", "uniform"), [3, 3]),
        # 3.2 M in the embedding, as in the head; 1.8 M in a layer
        ((PP, 2, "--pipeline-cut", "parameters"), [3, 3]),
        ((PP, 2, "--pipeline-schedule", "zb-v"), [2, 2, 2, 0]),
        ((PP, 2, THICK, 1, "--pipeline-cut", "uniform"), [1] * 6),
    ],
)
def test_the_cut_makes_the_costliest_stage_cheapest(flags, blocks):
    plan = plan_of(config_of(*flags))
    assert blocks_of(plan) == blocks
    assert sum(plan.stage_cost_shares()) == pytest.approx(1)


def test_the_flag_of_megatron_sets_the_group_of_interleaved():
    order = lambda *flags: plan_schedule(config_of(PP, 2, CHUNKS, 2, *flags), 8)
    first = lambda *flags: [i.microbatch for i in order(*flags)[0] if i.op is Op.F][:5]
    assert first() == [0, 1, 0, 1, 2] and first(GROUP, 4) == [0, 1, 2, 3, 0]


def test_recomputation_makes_layers_dearer_than_the_head():
    cost = lambda *flags: dict(
        zip(
            ("embedding", *["block"] * 6, "norm", "head"),
            plan_of(config_of(*flags)).layer_costs,
        )
    )
    plain, again = cost(PP, 2), cost(PP, 2, "--recompute-granularity", "full")
    assert (
        again["head"] == plain["head"]
        and again["block"].forward == plain["block"].forward
    )
    assert again["block"].total == pytest.approx(plain["block"].total * 4 / 3)


def test_logits_in_chunks_cost_their_product_again_and_leave_the_weight_half_nothing():
    cost = lambda *flags: plan_of(config_of(PP, 2, *flags)).layer_costs
    plain, again = cost(), cost("--cross-entropy-chunks", 4)
    assert again[:-1] == plain[:-1] and again[-1].forward == plain[-1].forward
    assert (
        again[-1].total == pytest.approx(plain[-1].total * 4 / 3)
        and again[-1].weight_grad == 0
    )


def test_logits_in_chunks_can_be_measured():
    config = config_of(
        PP,
        2,
        "--pipeline-cut",
        "measured",
        "--seq-length",
        8,
        "--cross-entropy-chunks",
        4,
    )
    assert time_layers(config, replace(context_of(), logit_chunks=4))["head"].total > 0


def test_costs_that_were_measured_decide_the_cut_and_reach_the_schedule():
    config = config_of(PP, 2, "--pipeline-cut", "measured")
    with pytest.raises(ConfigError, match="no measured times here"):
        plan_of(config)
    costs = {
        "embedding": LayerCost(1, 0, 1),
        "block": LayerCost(2, 2, 2),
        "norm": LayerCost(0, 0, 0),
        "head": LayerCost(9, 9, 9),
    }
    plan = plan_of(config, Times(costs, 5.5, "of a clock"))
    assert blocks_of(plan) == [5, 1]
    stages = plan.stage_costs()
    assert stages.forward == pytest.approx(
        (11 / 11, 11 / 11)
    ) and stages.input_grad == pytest.approx((10 / 11, 1))
    assert stages.transfer == pytest.approx(5.5 / 11)


def test_what_the_model_is_cut_by_does_not_change_what_its_computations_are_said_to_take():
    flops = plan_of(config_of(PP, 2, "--pipeline-layout", "3,3")).stage_costs()
    assert (
        flops.forward[1] > 1.5 * flops.forward[0] > 0 == flops.transfer
    )  # the head is on the second
    for cut in ("uniform", "parameters"):
        plan = plan_of(config_of(PP, 2, "--pipeline-cut", cut))
        assert blocks_of(plan) == [3, 3] and plan.stage_costs() == flops


def test_measuring_finds_where_the_time_goes_and_the_file_keeps_it(tmp_path):
    """The embedding reads rows only and has no input to differentiate for."""
    config = config_of(PP, 2, "--pipeline-cut", "measured", "--seq-length", 64)
    with layers_timed_by_operations():
        costs = time_layers(config, context_of())
    assert (
        set(costs) == {"embedding", "block", "norm", "head"}
        and costs["embedding"].input_grad == 0
    )
    block, head = costs["block"], costs["head"]
    assert min(block.forward, block.input_grad, head.forward, head.input_grad) > 0
    assert min(block.total, head.total) > 5 * costs["norm"].total
    assert time_transfer(config, solo("pp"), context_of()) == 0
    path, times = tmp_path / "deeper" / "costs.json", Times(costs, 0.25, SOURCE)
    write_costs(path, {"hidden_size": 384}, times)
    assert read_costs(path, {"hidden_size": 384}) == times
    assert (
        read_costs(path, {"hidden_size": 385}) is None
        and read_costs(tmp_path / "none.json", {}) is None
    )
    path.write_text("[]")
    with pytest.raises(ConfigError, match="contains no measured times"):
        read_costs(path, {})


def test_ends_on_two_ranks_are_tied_by_the_schedule_and_ends_on_one_rank_need_no_message():
    ties = lambda *flags: [
        i.stage
        for program in plan_schedule(config_of(*flags), 4)
        for i in program
        if i.op is Op.TIE
    ]
    assert (
        ties(PP, 2, CHUNKS, 2) == [0, 3]
        and ties(PP, 2, "--pipeline-schedule", "zb-v") == []
    )
    assert (
        ties(PP, 2, CHUNKS, 2, "--untie-embeddings-and-output-weights") == []
        and ties() == []
    )
