"""A model with experts trains the same under every layout as in one process, and its experts receive exactly
the same numbers of rows.

The steps are those of test_layout_grid.py. A choice of experts is discrete, so rounding could change it where
two scores are nearly equal. The router computes in fp64, and each reference run asserts that no choice and no
drop was closer than `MARGIN`, far above rounding in fp32. In bf16, whose rounding is too large for that, each
token passes all experts, and those drop by position.
"""

import os
import re
import tempfile
from functools import cache

import pytest
import torch

from megatron_ds.config import parse
from tests.harness.covering import cover_pairs, legal_cases
from tests.harness.layout_comparison import difference, parse_layout
from tests.harness.layout_runs import GLOBAL_BATCH, JOB_STEPS, STEPS, Run, run_layout
from tests.harness.moe_runs import MARGIN, ExpertsSeen, watched_experts
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

MOST_RANKS, WIDTH = 8, 48
LAYOUT = {
    "tp": (1, 2),
    "sp": (0, 1),
    "pp": (1, 2),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "offload": ("none", "cpu", "nvme"),
}
MODEL = {
    "dtype": ("fp32", "bf16"),
    "limit": ("dropless", "probs", "position"),
    "balance": ("aux", "seq", "global", "bias"),
}
# What follows from limit and balance, so that the number of reference runs stays small. All pairs with the
# layout are in the sample all the same: see the last test.
BALANCES = list(MODEL["balance"])
STYLES, DENSE = ("gpt2", "llama"), ("neither", "shared", "residual")
FLAGS = {
    "dropless": "",
    "probs": "--moe-expert-capacity-factor 0.9",
    "position": "--moe-expert-capacity-factor 0.7 --moe-token-drop-policy position --moe-min-capacity 2",
    "aux": "--moe-aux-loss-coeff 0.02",
    "seq": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3",
    "global": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.02 "
    "--moe-router-pre-softmax",
    "bias": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-router-topk-scaling-factor 1.5",
    "neither": "",
    "shared": "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    "residual": "--mlp-type residual",
}
# Seeds of jobs whose margins are too small with the first seed: (style, limit, balance, layers) → seed.
SEEDS = {
    ("llama", "probs", "global", 2): 8,
    ("llama", "dropless", "bias", 2): 2,
    ("gpt2", "probs", "bias", 2): 4,
    ("llama", "probs", "global", 4): 10,
    ("gpt2", "position", "global", 4): 4,
}


# The options on which `is_legal` depends.
JUDGED = (
    "tp",
    "sp",
    "pp",
    "dp",
    "ep",
    "zero",
    "schedule",
    "offload",
    "dtype",
    "limit",
    "balance",
)


def is_legal(case) -> bool:
    """As in test_layout_grid.py. Experts are divided over data-parallel ranks. In bf16, see above."""
    return (
        case["tp"] * case["pp"] * case["dp"] <= MOST_RANKS
        and (not case["sp"] or case["tp"] > 1)
        and case["dp"] % case["ep"] == 0
        and (case["pp"] > 1 or case["schedule"] == "1f1b")
        and (case["zero"] > 0 or case["offload"] == "none")
        and (
            case["dtype"] == "fp32"
            or (case["limit"] != "probs" and case["balance"] != "bias")
        )
    )


def with_rest(case) -> dict:
    """With style and dense part."""
    i = BALANCES.index(case["balance"]) + 3 * MODEL["limit"].index(case["limit"])
    return case | {"style": STYLES[i % 2], "dense": DENSE[i % 3]}


def cost(case) -> float:
    """Layers, and ranks that wait for each other."""
    return layers_of(case) * (2 + case["tp"] * case["pp"] * case["dp"])


def layers_of(case) -> int:
    return 4 if case["schedule"] in ("interleaved", "zb-v") else 2


@cache
def sampled_cases() -> list[dict]:
    cases = legal_cases(LAYOUT | MODEL, is_legal, JUDGED)
    return [with_rest(case) for case in cover_pairs(cases, cost=cost)]


def all_cases() -> list[dict]:
    """The product of what moves experts; the rest takes turns."""
    axes = {
        **{key: LAYOUT[key] for key in ("tp", "sp", "pp", "dp", "ep", "zero")},
        "dtype": MODEL["dtype"],
        "limit": MODEL["limit"],
    }
    turns = {
        "balance": BALANCES,
        **{key: LAYOUT[key] for key in ("recompute", "schedule", "offload")},
    }
    rest = {"balance": "aux", "schedule": "1f1b", "offload": "none"}
    cases = []
    for i, case in enumerate(legal_cases(axes, lambda case: is_legal(case | rest))):
        chosen = case | {key: values[i % len(values)] for key, values in turns.items()}
        illegal = {
            "schedule": case["pp"] == 1,
            "offload": case["zero"] == 0,
            "balance": case["dtype"] == "bf16" and chosen["balance"] == "bias",
        }
        cases.append(
            with_rest(
                chosen | {key: rest[key] for key, is_so in illegal.items() if is_so}
            )
        )
    return cases


def name_of(case) -> str:
    words = [case[key] for key in ("style", "dtype", "limit", "balance", "dense")]
    words += [f"{key}{case[key]}" for key in ("tp", "pp", "dp", "ep", "zero")] + [
        "sp"
    ] * case["sp"]
    words += [
        case[key]
        for key, usual in (
            ("recompute", "none"),
            ("schedule", "1f1b"),
            ("offload", "none"),
        )
        if case[key] != usual
    ]
    return "-".join(words)


def job_of(case) -> list[str]:
    layers, style = layers_of(case), case["style"]
    experts = "4" if style == "gpt2" else f"4 8 --moe-layer-freq [0]*{layers - 2}+[1]*2"
    topk = 2 if case["dtype"] == "fp32" else 4
    experts = "4" if topk == 4 else experts
    seed = SEEDS.get((style, case["limit"], case["balance"], layers), 1234)
    return [
        *tiny_job(style, case["dtype"], True, 0.0, layers, GLOBAL_BATCH, JOB_STEPS),
        "--num-experts",
        *experts.split(),
        "--moe-router-topk",
        str(topk),
        "--moe-router-dtype",
        "fp64",
        "--moe-ffn-hidden-size",
        str(WIDTH),
        "--seed",
        str(seed),
        *["--init-method-std", "0.1"]
        * (case["dtype"] == "fp32"),  # wide margins of choices
        *" ".join(FLAGS[case[key]] for key in ("limit", "balance", "dense")).split(),
    ]


def layout_of(case) -> str:
    where = [f"offload={case['offload']}", f"offload_param={case['offload']}"][
        : 2 if case["zero"] == 3 else 1
    ]
    disk = [f"nvme={tempfile.gettempdir()}"] if case["offload"] == "nvme" else []
    chunks = ["chunks=2"] * (layers_of(case) == 4)
    return ",".join(
        [
            *(f"{key}={case[key]}" for key in LAYOUT if key != "offload"),
            *chunks,
            *where,
            *disk,
        ]
    )


@cache
def reference_of(job: tuple[str, ...]) -> tuple[Run, ExpertsSeen]:
    with watched_experts(margins=True) as seen:
        run = run_layout(list(job), parse_layout("", mbs="1").reference)
    return run, seen


def check(case) -> None:
    reference, alone = reference_of(tuple(job_of(case)))
    exact = case["dtype"] == "fp32"
    if exact:
        assert alone.choice_margin > MARGIN, "give the job another seed, in SEEDS"
        assert alone.drop_margin > MARGIN, "give the job another seed, in SEEDS"
    with watched_experts() as seen:
        run = run_layout(job_of(case), layout_of(case))
    assert seen.loads() == alone.loads()
    found = difference(run.merged, reference.merged, run.model)
    assert found.is_within(TOLERANCE[case["dtype"]]), found
    check_metrics(run, reference, exact)
    check_in_force(case, run, seen)


def check_metrics(run: Run, reference: Run, exact: bool) -> None:
    """Integers are equal; means are as near as the loss."""
    for here, there in zip(
        run.merged[0].metrics, reference.merged[0].metrics, strict=True
    ):
        assert here.keys() == there.keys()
        for name, mean in there.items():
            if name.endswith(("max load", "dropped")):
                assert here[name] == mean, name
            else:
                assert here[name] == pytest.approx(mean, rel=2e-6 if exact else 1e-2), (
                    name
                )


@pytest.mark.parametrize("case", sampled_cases(), ids=name_of)
def test_experts_train_under_a_layout_as_in_one_process(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize(
    "case", all_cases() if os.environ.get("MEGATRON_DS_TEST_ALL") else [], ids=name_of
)
def test_experts_train_under_every_layout_as_in_one_process(case):
    check(case)


def test_the_sample_holds_every_pair_of_values_and_every_style_and_dense_part_with_every_layout():
    sample, cases = sampled_cases(), legal_cases(LAYOUT | MODEL, is_legal, JUDGED)
    assert len(sample) < 32
    options = LAYOUT | MODEL
    for a in options:
        for b in options:
            assert cases.pairs(a, b) == {(case[a], case[b]) for case in sample}
    for key, values in (("style", STYLES), ("dense", DENSE)):
        for other in ("tp", "sp", "pp", "ep", "zero", "recompute"):
            assert {(case[key], case[other]) for case in sample} == {
                (a, b) for a in values for b in LAYOUT[other]
            }


def check_in_force(case, run: Run, seen: ExpertsSeen) -> None:
    """What the ranks showed of the case's options."""
    t, d, ep, weights, metrics = (
        case["tp"],
        case["dp"],
        case["ep"],
        run.merged[1],
        run.merged[0].metrics,
    )
    config = parse(
        [*job_of(case), *parse_layout(layout_of(case), mbs="1").flags],
        world_size=t * d * case["pp"],
    )
    experts = [n for n in config.model.experts if n]
    topk = config.model.moe_router_topk
    # Each expert is on one rank of an expert-parallel group, each row goes to an expert.
    assert seen.local_experts == {n // ep for n in experts}
    assert seen.widths == {WIDTH * (2 if case["style"] == "llama" else 1) // t}
    assert len(seen.chosen) == len(experts) * STEPS * GLOBAL_BATCH
    assert {int(rows.sum()) for rows in seen.chosen.values()} == {SEQ_LENGTH * topk}
    runs = STEPS * GLOBAL_BATCH * t * (2 if case["recompute"] == "full" else 1)
    assert set(seen.runs.values()) == {runs} and len(seen.runs) == len(experts)
    assert (seen.dropped > 0) == (case["limit"] != "dropless")
    assert any("dropped" in name for name in metrics[0]) == (
        case["limit"] != "dropless"
    )
    assert (
        topk == 4
        or max(int(rows.max()) for rows in seen.chosen.values())
        > SEQ_LENGTH * topk // 4
    )
    sent = sum(
        s.traffic.bytes[op, "ep", ep]
        for s in run.seen
        for op in ("all_to_all_v", "all_to_all")
    )
    assert (sent > 0) == (ep > 1)

    # Losses and memories of the routers.
    named = set().union(*metrics)
    term = {
        "aux": "load balancing loss",
        "seq": "seq load balancing loss",
        "global": "global load balancing loss",
        "bias": None,
    }[case["balance"]]
    assert {name for name in named if "balancing" in name} == (
        {term} if term else set()
    )
    assert ("router z-loss" in named) == (case["balance"] == "seq")
    biases = [w for name, w in weights.items() if name.endswith("expert_bias")]
    assert len(biases) == len(experts) * (case["balance"] == "bias")
    assert all(
        b.abs().sum() > 0 and (b / 0.01).round().sub(b / 0.01).abs().max() < 1e-4
        for b in biases
    )
    last = [w for name, w in weights.items() if ".router.last_" in name]
    assert len(last) == len(experts) * (case["balance"] == "global") and all(
        w.sum() > 0 for w in last
    )
    parts = {
        "shared": "mlp.shared_experts.gate_weight",
        "residual": "mlp.coefficient",
        "neither": None,
    }
    assert {
        name.split("mlp.")[1]
        for name in weights
        if "coefficient" in name or "gate_weight" in name
    } == (
        {parts[case["dense"]].removeprefix("mlp.")} if parts[case["dense"]] else set()
    )
    assert any("experts.linear_fc1.bias" in name for name in weights) == (
        case["style"] == "gpt2"
    )

    # ZeRO divides experts over the ranks that hold the same ones, everything else over all data ranks.
    expert = sum(w.numel() for name, w in weights.items() if ".mlp.experts." in name)
    dense = (
        sum(
            w.numel()
            for name, w in weights.items()
            if not re.search(r"router\.(expert_bias|last_)", name)
        )
        - expert
    )
    held = sum(s.optimizer_bytes for s in run.seen)
    copies = (d, d // ep) if case["zero"] == 0 else (1, 1)
    assert held >= 8 * (dense * copies[0] + expert * copies[1])
    assert held == pytest.approx(
        8 * (dense * copies[0] + expert * copies[1]), rel=0.35
    )  # norms are on
    places = set.union(*(s.places for s in run.seen))  # all tp ranks
    assert places - {"device"} == (
        {case["offload"]} if case["offload"] != "none" else set()
    )
    dtype = torch.float32 if case["dtype"] == "fp32" else torch.bfloat16
    assert set.union(*(s.dtypes for s in run.seen)) == {dtype}
