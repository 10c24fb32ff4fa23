"""The heart of the promise: a model trains the same under every layout as in one process.

Twenty steps of the job of tools/compare_layouts.py on up to eight threaded ranks, with masked labels,
warm-up, weight decay and clipping in force. `make test` takes the first four of them, and few cases in which
every pair of option values appears, all of them in fp32, whose tolerance is that of rounding; `make test-all`
takes the whole product. Every case also shows that its options are in force.
"""

import math
import os
import tempfile
from functools import cache

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.models import MODELS
from megatron_ds.pipeline.instruction import Op
from megatron_ds.planning.run_plan import plan_run, plan_schedule
from tests.harness.covering import cover_pairs, legal_cases
from tests.harness.layout_comparison import parse_layout
from tests.harness.layout_runs import (
    GLOBAL_BATCH,
    JOB_STEPS,
    NUM_LAYERS,
    STEPS,
    Run,
    reference_of,
    run_layout,
    stray,
)
from tests.harness.model_runs import context_of
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

MOST_RANKS, HIDDEN, HEAD_ROWS = 8, 32, 8
LAYOUT = ("tp", "pp", "dp", "zero", "sp", "recompute")
GRID = {
    "style": ("gpt2", "llama"),
    "dtype": ("fp32", "bf16"),
    "embeddings": ("tied", "untied"),
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "sp": (0, 1),
    "recompute": ("none", "selective", "full"),
}
OFFLOADS = ("none", "cpu", "nvme")
# Stages on each pipeline rank, for each schedule.
SCHEDULES = {
    "1f1b": (1,),
    "gpipe": (1,),
    "interleaved": (2,),
    "zb-h1": (1,),
    "zb-h2": (1,),
    "zb-v": (2,),
    "zb-auto": (1,),
}
SAMPLED = GRID | {
    "schedule": tuple(SCHEDULES),
    "chunks": (1, 2),
    "offload": OFFLOADS,
    "dropout": (0.0, 0.1),
    "documents": ("joined", "apart"),
    "ltd": (0, 1),
    "features": ("plain", "heads", "block"),
}
# What attention does with its heads and positions, and what a block does with its parts.
FEATURES = {
    "plain": [],
    "heads": [
        "--qk-layernorm",
        "--add-qkv-bias",
        "--window-size",
        "5,0",
        "--window-attn-skip-freq",
        "2",
        "--softmax-type",
        "learnable",
    ],
    "block": [
        "--use-parallel-residual",
        "--apply-layernorm-1p",
        "--decoupled-lr",
        "2e-3",
    ],
}
OF_STYLE = {
    "llama": {
        "heads": [
            "--rotary-interleaved",
            "--rotary-percent",
            "0.5",
            "--kv-channels",
            "12",
            "--position-embedding-type",
            "yarn",
            "--original-max-position-embeddings",
            "12",
        ],
        "block": ["--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "2"],
    },
    "gpt2": {"heads": ["--position-embedding-type", "alibi"]},
}
# Blocks but the first and the last: from 8 of the 24 tokens to all of them in 3 of the steps.
LTD = "--random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 3 --random-ltd-tokens-per-step 8".split()
LTD_TOKENS = range(8, SEQ_LENGTH, 8)


# The options on which `is_legal` depends.
JUDGED = ("tp", "pp", "dp", "zero", "sp", "schedule", "chunks", "offload")


def ranks(case) -> int:
    return case["tp"] * case["pp"] * case["dp"]


def is_legal(case) -> bool:
    """Sequence parallelism splits over tensor-parallel ranks, one stage has nothing to schedule, ZeRO 0
    nothing to offload."""
    return (
        ranks(case) <= MOST_RANKS
        and (not case["sp"] or case["tp"] > 1)
        and ("schedule" not in case or case["chunks"] in SCHEDULES[case["schedule"]])
        and (case["pp"] > 1 or case.get("schedule", "1f1b") == "1f1b")
        and (case["zero"] > 0 or case.get("offload", "none") == "none")
    )


@cache
def sampled_cases() -> list[dict]:
    cases = legal_cases(SAMPLED, is_legal, JUDGED)
    exact = cover_pairs(cases.where("dtype", "fp32"), cost=ranks)
    return cover_pairs(cases, cost=ranks, chosen=exact)


def all_cases() -> list[dict]:
    """The schedule, which moves work in time only, and offloading, which moves state in space only, take
    turns."""
    turns = [
        (name, chunks) for name, numbers in SCHEDULES.items() for chunks in numbers
    ]
    cases = []
    for i, case in enumerate(legal_cases(GRID, is_legal)):
        schedule, chunks = turns[i % len(turns)] if case["pp"] > 1 else ("1f1b", 1)
        cases.append(
            case
            | {
                "schedule": schedule,
                "chunks": chunks,
                "dropout": 0.0,
                "documents": ("joined", "apart")[i % 2],
                "ltd": i // 2 % 2,
                "features": tuple(FEATURES)[i % 3],
                "offload": OFFLOADS[i // len(turns) % 3] if case["zero"] else "none",
            }
        )
    return cases


def name_of(case) -> str:
    words = [
        case["style"],
        case["dtype"],
        case["embeddings"],
        *(f"{key}{case[key]}" for key in LAYOUT[:4]),
    ]
    words += (
        ["sp"] * case["sp"]
        + [case["recompute"]] * (case["recompute"] != "none")
        + [case["schedule"]]
    )
    words += [f"chunks{case['chunks']}"] * (case["chunks"] > 1)
    words += [case["offload"]] * (case["offload"] != "none")
    words += [case["documents"]] * (case["documents"] == "apart") + ["ltd"] * case[
        "ltd"
    ]
    words += [case["features"]] * (case.get("features", "plain") != "plain")
    return "-".join(words) + f"-dropout{case['dropout']}" * (case["dropout"] > 0)


def layers_of(case) -> int:
    """Each stage takes a layer."""
    return max(NUM_LAYERS, case["pp"] * case["chunks"])


def job_of(case) -> list[str]:
    # test_sample_layouts.py
    reading = {
        option: case[option] for option in ("samples", "readers") if option in case
    }
    job = tiny_job(
        case["style"],
        case["dtype"],
        case["embeddings"] == "untied",
        case["dropout"],
        layers_of(case),
        GLOBAL_BATCH,
        JOB_STEPS,
        case["documents"],
        **reading,
    )
    features = case.get("features", "plain")
    of_style = OF_STYLE[case["style"]].get(features, [])
    return job + LTD * case["ltd"] + FEATURES[features] + of_style


def layout_of(case) -> str:
    where = [f"offload={case['offload']}", f"offload_param={case['offload']}"][
        : 2 if case["zero"] == 3 else 1
    ]
    disk = [f"nvme={tempfile.gettempdir()}"] if case["offload"] == "nvme" else []
    chunks = [f"chunks={case['chunks']}"] * (case["chunks"] > 1)
    return ",".join(
        [
            *(f"{key}={case[key]}" for key in (*LAYOUT, "schedule")),
            *chunks,
            *where,
            *disk,
        ]
    )


def check(case) -> None:
    difference, run = stray(job_of(case), layout_of(case))
    assert difference.is_within(TOLERANCE[case["dtype"]]), difference
    check_in_force(case, run)


@pytest.mark.parametrize("case", sampled_cases(), ids=name_of)
def test_a_layout_trains_like_one_process(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize(
    "case", all_cases() if os.environ.get("MEGATRON_DS_TEST_ALL") else [], ids=name_of
)
def test_every_layout_trains_like_one_process(case):
    check(case)


def test_the_sample_holds_every_pair_of_values_in_fp32_and_each_of_them_in_bf16():
    sample = sampled_cases()
    exact = [case for case in sample if case["dtype"] == "fp32"]
    assert len(sample) < 40
    cases = legal_cases(SAMPLED, is_legal, JUDGED)
    for i, a in enumerate(SAMPLED):
        for b in [*SAMPLED][i:]:
            pairs = cases.pairs(a, b)
            assert pairs == {(case[a], case[b]) for case in sample}
            assert {p for p in pairs if "bf16" not in p} == {
                (case[a], case[b]) for case in exact
            }


def check_in_force(case, run: Run) -> None:
    """What the ranks showed of the case's options."""
    t, p, d, seen = case["tp"], case["pp"], case["dp"], run.seen
    pp_rank_of = lambda rank: rank // (t * d)  # tp varies fastest, then dp
    microbatches, chunks, layers = GLOBAL_BATCH // d, case["chunks"], layers_of(case)
    rotary, weights = case["style"] == "llama", run.merged[1]

    assert {s.dtypes.pop() for s in seen} == {
        torch.float32 if case["dtype"] == "fp32" else torch.bfloat16
    }
    assert ("output_layer.weight" in weights) == (case["embeddings"] == "untied")
    heads, block = (case.get("features") == name for name in ("heads", "block"))
    assert ("embedding.position_embeddings.weight" in weights) == (
        not rotary and not heads
    )
    assert ("decoder.layers.0.self_attention.q_layernorm.weight" in weights) == heads
    assert (
        "decoder.layers.0.self_attention.core_attention.softmax_offset" in weights
    ) == heads
    assert ("decoder.layers.0.self_attention.linear_qkv.bias" in weights) == (
        heads or not rotary
    )
    assert (weights["decoder.final_layernorm.weight"].mean() < 0.5) == block
    assert set.union(*(s.parallel for s in seen)) == {block}
    # 4 heads of queries; of keys and values as many, or 2
    rows = (4 + 2 * (2 if rotary else 4)) * (12 if heads and rotary else HEAD_ROWS)
    assert set.union(*(s.qkv_rows for s in seen)) == {rows // t}
    blocks = [
        len({name for name in s.layers if name.endswith("linear_qkv")}) for s in seen
    ]
    assert sum(blocks) == layers * t * d and all(
        0 < n <= layers - p + 1 for n in blocks
    )
    assert [s.stages for s in seen] == [
        stages_on(case, pp_rank_of(rank)) for rank in range(len(seen))
    ]

    apart = case["documents"] == "apart"
    assert (
        {s.most_documents > 1 for s in seen}
        == {s.restarts > 0 for s in seen}
        == {apart}
    )
    length = SEQ_LENGTH // t if case["sp"] else SEQ_LENGTH
    kept = (
        {tokens * length // SEQ_LENGTH for tokens in LTD_TOKENS}
        if case["ltd"]
        else set()
    )
    assert set.union(*(s.block_inputs for s in seen)) == {
        (tokens, 1, HIDDEN) for tokens in {length} | kept
    }
    assert {s.forwards for s in seen} == {STEPS * microbatches * chunks}
    assert {s.weight_halves for s in seen} == {
        STEPS * microbatches * chunks * case["schedule"].startswith("zb")
    }
    assert [s.peak_alive for s in seen] == [
        alive_on(case, microbatches, pp_rank_of(rank)) for rank in range(len(seen))
    ]

    forwards = STEPS * GLOBAL_BATCH * layers * t
    assert run.calls.count("attention") == forwards * (
        1 if case["recompute"] == "none" else 2
    )
    assert run.calls.count("mlp") == forwards * (
        2 if case["recompute"] == "full" else 1
    )

    elements = sum(s.parameter_elements for s in seen) / d
    wide = case["dtype"] == "fp32"
    for kind, split_from, size in (
        ("parameter", 3, 4 if wide else 2),
        ("gradient", 2, 4),
        ("optimizer", 1, 8),
        ("master", 1, 0 if wide else 4),
    ):
        copies = 1 if case["zero"] >= split_from else d  # of each element's state
        held = sum(getattr(s, f"{kind}_bytes") for s in seen)
        assert held == pytest.approx(copies * elements * size, rel=0.25), (
            kind
        )  # rel: padding to 64
    places = set.union(*(s.places for s in seen))
    assert places - {"device"} == (
        {case["offload"]} if case["offload"] != "none" else set()
    )


def stages_on(case, rank: int) -> tuple[int, ...]:
    p = case["pp"]
    if case["schedule"] == "zb-v":
        return rank, 2 * p - 1 - rank
    return tuple(chunk * p + rank for chunk in range(case["chunks"]))


def alive_on(case, m: int, rank: int) -> int:
    """Micro-batches, times stages, whose F is done and whose B or I is not."""
    p, schedule = case["pp"], case["schedule"]
    if (
        schedule in ("zb-v", "zb-auto")
        or (schedule == "interleaved" and m % p)
        or (schedule == "zb-h2" and m < 2 * p - 1)
    ):
        config = parse(
            [*job_of(case), *parse_layout(layout_of(case), mbs="1").flags],
            world_size=ranks(case),
        )
        plan, alive = plan_run(config, MODELS["gpt"](config.model, context_of())), [0]
        # no closed form: from each F to its B or I
        for i in plan_schedule(config, m, costs=plan.stage_costs())[rank]:
            alive.append(alive[-1] + (i.op is Op.F) - (i.op in (Op.B, Op.I)))
        assert max(alive) <= {"zb-auto": p, "zb-h2": 2 * (p - rank) - 1}.get(
            schedule, math.inf
        )
        return max(alive)
    return min(
        m * case["chunks"],
        {
            "gpipe": m,
            "zb-h2": 2 * (p - rank) - 1,
            "interleaved": 2 * (p - rank - 1) + p + 1,
        }.get(schedule, p - rank),
    )


# What the grid does not hold. What shows in a few steps is given a few.

FEW, FP16_STEPS = 4, 10


@pytest.mark.parametrize(
    "style, layout, scale",
    [
        ("gpt2", "tp=2,pp=2,dp=2,zero=1", 2.0**24),
        ("llama", "tp=1,pp=4,dp=2,zero=0,recompute=full", 2.0**24),
        ("gpt2", "tp=2,pp=2,dp=2,zero=1,sp=1", 2.0**12),
        ("gpt2", "tp=2,pp=2,dp=2,zero=3", 2.0**24),
        ("gpt2", "dp=2,zero=3,offload=cpu,offload_param=cpu", 2.0**24),
        ("llama", "pp=2,dp=2,zero=2,offload=cpu,ratio=0.5", 2.0**24),
        ("llama", "dp=2,zero=2,accumulate=full", 2.0**24),
    ],
)
def test_fp16_overflows_and_recovers_alike_in_every_layout(style, layout, scale):
    """At 2**24 the first steps overflow and the scale sinks until they do not; then it rises again, and one
    more does.

    Not with sequence parallelism: a norm's gradient is then summed in two halves, and each half may fit where
    the whole does not, so that the scale sinks once less.
    """
    job = [
        *tiny_job(style, "fp16", False, 0.0, 4, GLOBAL_BATCH, FP16_STEPS),
        "--hysteresis",
        "1",
        "--loss-scale-window",
        "2",
    ]
    job[job.index("--initial-loss-scale") + 1] = str(scale)
    difference, run = stray(job, layout, FP16_STEPS)
    assert difference.is_within(TOLERANCE["fp16"]), difference
    overflows = [not math.isfinite(norm) for norm in run.merged[0].grad_norms]
    assert any(overflows[:4]) == any(overflows[6:]) == (scale > 2**20) and not all(
        overflows[6:]
    )
    assert run.seen[0].dtypes == {torch.float16}


@pytest.mark.parametrize(
    "growth",
    [
        "--rampup-batch-size 4 4 20",
        f"--step-batch-size-schedule 0:4 {20 * SEQ_LENGTH}:8",
    ],
)
def test_a_growing_batch_gives_every_layout_the_same_samples(growth):
    job = tiny_job("gpt2", "fp32", False, 0.1, NUM_LAYERS, 8, 10)
    for name, samples in (
        ("--train-iters", "--train-samples"),
        ("--lr-warmup-iters", "--lr-warmup-samples"),
    ):
        at = job.index(name)
        job[at : at + 2] = [samples, str(int(job[at + 1]) * 8)]
    growing = [*job, *growth.split()]
    difference, run = stray(growing, "tp=2,pp=2,dp=2,zero=1,sp=1", 10)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert {s.forwards for s in run.seen} == {5 * 2 + 5 * 4}
    assert run.merged[0].losses != reference_of(job, "", 10).merged[0].losses


def test_tokens_that_weigh_alike_make_the_micro_batch_size_a_matter_of_layout():
    job = [
        *tiny_job("llama", "fp32", True, 0.1, NUM_LAYERS, GLOBAL_BATCH, FEW),
        "--calculate-per-token-loss",
    ]
    (difference, run), one_by_one = (
        stray(job, "tp=2,pp=2,dp=1,zero=0,sp=1,mbs=2", FEW),
        reference_of(job, "mbs=1", FEW),
    )
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert run.merged[0].losses == pytest.approx(one_by_one.merged[0].losses, rel=1e-6)
    assert {s.forwards for s in run.seen} == {FEW * GLOBAL_BATCH // 2}
    weighed_by_micro_batch = reference_of(job[:-1], "mbs=1", FEW).merged[0].losses
    assert weighed_by_micro_batch != pytest.approx(
        one_by_one.merged[0].losses, rel=1e-4
    )


def test_an_uneven_cut_and_smoothed_labels_train_like_one_process():
    job = [
        *tiny_job("gpt2", "fp32", False, 0.0, 5, GLOBAL_BATCH, FEW),
        "--label-smoothing",
        "0.2",
    ]
    difference, run = stray(
        job, "tp=2,pp=2,dp=2,zero=1,recompute=full,layout=Et|t*4L", FEW
    )
    assert difference.is_within(TOLERANCE["fp32"]), difference


@pytest.mark.parametrize(
    "style, dtype, layout, options",
    [
        (
            "gpt2",
            "fp32",
            "tp=2,pp=2,dp=2,zero=1,sp=1,logits=3",
            "--label-smoothing 0.2",
        ),
        ("gpt2", "fp32", "tp=2,dp=2,zero=3,recompute=full,logits=5", ""),
        (
            "llama",
            "fp32",
            "tp=2,pp=2,zero=0,schedule=zb-h1,sp=1,logits=4",
            "--calculate-per-token-loss",
        ),
        ("llama", "fp32", "pp=2,dp=2,zero=3,schedule=zb-v,chunks=2,logits=24", ""),
        ("llama", "bf16", "tp=2,pp=2,dp=2,zero=2,schedule=gpipe,logits=2", ""),
        ("bert", "fp32", "tp=2,pp=2,dp=2,zero=2,sp=1,logits=3", ""),
        (
            "bert",
            "fp32",
            "tp=2,pp=2,zero=0,schedule=zb-v,chunks=2,logits=2",
            "--label-smoothing 0.1",
        ),
    ],
)
def test_logits_in_chunks_train_like_one_process_with_whole_logits(
    style, dtype, layout, options
):
    job = [
        *tiny_job(style, dtype, style == "llama", 0.1, 4, GLOBAL_BATCH, FEW),
        *options.split(),
    ]
    difference, run = stray(job, layout, FEW)
    assert difference.is_within(TOLERANCE[dtype]), difference
    t = 2 if "tp=2" in layout else 1
    assert run.calls.count("logits in chunks") == FEW * GLOBAL_BATCH * t
    assert not reference_of(job, layout, FEW).calls.count("logits in chunks")


@pytest.mark.parametrize(
    "style, layout",
    [
        # 8 micro-batches, 3 ranks
        ("gpt2", "pp=2,dp=2,zero=2,chunks=3,accumulate=full"),
        ("llama", "pp=3,chunks=2,zero=1"),
        ("gpt2", "pp=2,dp=2,zero=3,schedule=zb-v,pin=1,layout=Et*2|t*3|t|L"),
        ("gpt2", "pp=3,schedule=zb-v,recompute=full,mbs=2"),
    ],
)
def test_stages_of_a_rank_may_be_many_uneven_and_no_divisor_of_the_micro_batches(
    style, layout
):
    difference, run = stray(tiny_job(style, "fp32", False, 0.1, 6, 8, FEW), layout, FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert {len(s.stages) for s in run.seen} == {3 if "chunks=3" in layout else 2}


@pytest.mark.parametrize(
    "style, layout",
    [
        ("gpt2", "dp=2,zero=2,accumulate=full"),
        ("llama", "pp=2,dp=2,zero=3,accumulate=full"),
        ("gpt2", "pp=2,dp=2,zero=3,pin=1,schedule=gpipe"),
        ("llama", "dp=2,zero=3,prefetch=0,persist=0"),
        ("gpt2", "dp=2,zero=3,prefetch=1000000,recompute=full"),
        ("gpt2", "dp=2,tp=2,zero=3,bucket=1000"),
        ("llama", "dp=3,zero=3,recompute=selective"),
        ("gpt2", "dp=6,zero=2"),
        ("llama", "dp=3,zero=3,persist=100000"),
    ],
)
def test_the_knobs_of_zero_2_and_3_move_time_and_memory_only(style, layout):
    batch = 6 if "dp=3" in layout or "dp=6" in layout else GLOBAL_BATCH
    difference, _ = stray(
        tiny_job(style, "fp32", False, 0.1, NUM_LAYERS, batch, FEW), layout, FEW
    )
    assert difference.is_within(TOLERANCE["fp32"]), difference


def test_the_size_of_buckets_changes_no_bit_of_the_gradient():
    job = tiny_job("gpt2", "fp32", False, 0.0, NUM_LAYERS, GLOBAL_BATCH, FEW)
    job[job.index("--clip-grad") + 1] = "0"  # the norm adds squares in another order
    for zero in (1, 2, 3):
        (_, one), (_, other) = (
            run_layout(job, f"dp=2,zero={zero},bucket={bucket}", FEW).merged
            for bucket in (500, 10**6)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_in_sixteen_bits_stray_no_further_than_sixteen_bits_may():
    job = tiny_job("llama", "bf16", True, 0.0, NUM_LAYERS, GLOBAL_BATCH, FEW)
    difference, run = stray(job, "dp=2,tp=2,pp=2,zero=3,grads=bf16", FEW)
    assert difference.is_within(TOLERANCE["bf16"]), difference
    held, elements = (
        sum(getattr(s, name) for s in run.seen)
        for name in ("gradient_bytes", "parameter_elements")
    )
    # half of the elements each, two bytes an element
    assert held == pytest.approx(elements / 2 * 2, rel=0.25)
