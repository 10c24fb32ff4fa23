"""A model trains the same when ranks share each sequence: cp x comm type x all that it meets.

As in test_layout_grid.py, every pair of option values appears in few cases, here in fp32."""

from functools import cache

import pytest
import torch

from megatron_ds.context_parallel.head_exchange import ToTokens
from megatron_ds.ops.cpu import compiled_attention
from tests.harness.covering import cover_pairs, legal_cases
from tests.harness.layout_runs import (
    GLOBAL_BATCH,
    JOB_STEPS,
    STEPS,
    reference_of,
    stray,
)
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

MOST_RANKS, LAYERS = 8, 3
FEW = STEPS if STEPS == JOB_STEPS else 4  # all with MEGATRON_DS_TEST_ALL=1
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-ffn-hidden-size 32"
)
FEATURES = {
    "plain": "",
    "experts": EXPERTS,
    "limited experts": f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss "
    "--moe-expert-capacity-factor 1.0",
    "padded experts": f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
    "--moe-token-drop-policy position",
    "ltd": "--random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 6 --random-ltd-tokens-per-step 8",
    "heads": "--qk-layernorm --add-qkv-bias --position-embedding-type alibi --calculate-per-token-loss",
    "window": "--softmax-type learnable --window-size",
}
COMM_TYPES = {
    "p2p": "p2p",
    "all_gather": "all_gather",
    "a2a": "a2a",
    "levels": "a2a+p2p",
}
GRID = {
    "style": ("gpt2", "llama", "bert"),
    "cp": (2, 4),
    "comm": tuple(COMM_TYPES),
    "tp": (1, 2),
    "sp": (0, 1),
    "pp": (1, 2),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "dropout": (0.0, 0.1),
    "documents": ("joined", "apart"),
    "features": tuple(FEATURES),
}
# The options on which `is_legal` depends.
JUDGED = (
    "style",
    "cp",
    "comm",
    "tp",
    "sp",
    "pp",
    "schedule",
    "dp",
    "documents",
    "features",
)


def ranks(case) -> int:
    return case["cp"] * case["tp"] * case["pp"] * case["dp"]


def is_legal(case) -> bool:
    """Documents are kept apart in GPTs; 4 heads, or 2 groups of them, are divided by tp and a2a."""
    heads = 4 // case["tp"]
    return (
        ranks(case) <= MOST_RANKS
        and (not case["sp"] or case["tp"] > 1)
        and (case["pp"] > 1 or case["schedule"] == "1f1b")
        and (
            case["style"] != "bert"
            or case["documents"] == "joined"
            and case["features"] != "ltd"
        )
        and (case["comm"] != "a2a" or heads % case["cp"] == 0)
        and (case["comm"] != "levels" or case["cp"] == 4)
    )


@cache
def cases() -> list[dict]:
    return cover_pairs(legal_cases(GRID, is_legal, JUDGED), cost=ranks)


def name_of(case) -> str:
    return "-".join(
        str(value) if isinstance(value, str) else f"{key}{value}"
        for key, value in case.items()
    )


def job_of(case) -> list[str]:
    layers = max(LAYERS, 4 * (case["pp"] > 1))
    job = tiny_job(
        case["style"],
        "fp32",
        case["style"] == "llama",
        case["dropout"],
        layers,
        GLOBAL_BATCH,
        JOB_STEPS,
        case["documents"],
    )
    window = ["5,3" if case["style"] == "bert" else "5,0"] * (
        case["features"] == "window"
    )
    return [
        *job,
        *FEATURES[case["features"]].split(),
        *window,
        "--cp-comm-type",
        COMM_TYPES[case["comm"]],
    ]


def layout_of(case) -> str:
    keys = ["cp", "tp", "sp", "pp", "dp", "zero", "recompute", "schedule"]
    chunks = ",chunks=2" * (case["schedule"] in ("interleaved", "zb-v"))
    experts = f",ep={2 * case['dp']}" * ("experts" in case["features"])
    levels = ",hcp=2 2" * (case["comm"] == "levels")
    return ",".join(f"{key}={case[key]}" for key in keys) + chunks + experts + levels


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_ranks_that_share_sequences_train_like_one_process(case):
    difference, run = stray(job_of(case), layout_of(case), FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    # In force: each rank holds its share of the tokens, and attention communicates.
    held = SEQ_LENGTH // case["cp"] // (case["tp"] if case["sp"] else 1)
    shapes = set.union(*(s.block_inputs for s in run.seen))
    assert max(shapes)[0] == held
    calls = {
        operation
        for s in run.seen
        for operation, axes, _ in s.traffic.calls
        if axes.startswith("cp")
    }
    wanted = {
        "p2p": {"send"},
        "all_gather": {"all_gather"},
        "a2a": {"all_to_all"},
        "levels": {"send", "all_to_all"},
    }[case["comm"]]
    assert wanted <= calls and ("send" in calls) == ("send" in wanted)


@pytest.mark.skipif(
    compiled_attention.reason_against(torch.float32) != "",
    reason="no compiled attention on this machine",
)
@pytest.mark.parametrize(
    "style, comm, flags, layout",
    [
        ("gpt2", "a2a", "", "cp=2,dp=2,zero=3"),
        ("llama", "p2p a2a p2p", "", "cp=2"),
        ("llama", "a2a", "", "cp=2,tp=2,sp=1,recompute=selective"),
        ("gpt2", "a2a", "--softmax-type learnable --window-size 9,0", "cp=4,pp=2"),
        ("gpt2", "a2a", "--position-embedding-type alibi", "cp=2,recompute=full"),
        ("bert", "a2a", "", "cp=4"),
        ("llama", "p2p", "", "cp=4,pp=2"),
        ("gpt2", "p2p", "--softmax-type learnable", "cp=2"),
    ],
)
def test_ranks_with_compiled_attention_train_like_one_process(
    style, comm, flags, layout, monkeypatch
):
    """Heads have 32 channels. Ranks of a2a take D of their tokens' rows in place of a second output."""
    kept, before = [], ToTokens.of_rows
    monkeypatch.setattr(
        ToTokens, "of_rows", lambda *given: kept.append(1) or before(*given)
    )
    documents = "joined" if style == "bert" else "apart"
    job = [
        *tiny_job(
            style,
            "fp32",
            style == "llama",
            0.0,
            LAYERS,
            GLOBAL_BATCH,
            JOB_STEPS,
            documents,
        ),
        "--kv-channels",
        "32",
        "--cp-comm-type",
        *comm.split(),
        *flags.split(),
    ]
    difference, _ = stray(job, layout, FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    assert bool(kept) == ("a2a" in comm and "selective" not in layout)


def test_each_layer_may_share_attention_in_its_own_way():
    job = [
        *tiny_job("llama", "fp32", True, 0.1, LAYERS, GLOBAL_BATCH, JOB_STEPS, "apart"),
        "--cp-comm-type",
        "p2p",
        "a2a",
        "all_gather",
    ]
    difference, run = stray(job, "cp=2,pp=2,zero=1", FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    calls = {
        operation
        for s in run.seen
        for operation, axes, _ in s.traffic.calls
        if axes == "cp"
    }
    assert {"send", "all_to_all", "all_gather"} <= calls


def test_the_sample_holds_every_pair_of_values():
    sample = cases()
    everything = legal_cases(GRID, is_legal, JUDGED)
    for i, a in enumerate(GRID):
        for b in [*GRID][i:]:
            assert everything.pairs(a, b) == {(case[a], case[b]) for case in sample}


def test_another_way_to_cut_or_to_mask_would_show():
    """Losses of different seeds of dropout differ by more than the tolerance of the grid."""
    job = tiny_job("gpt2", "fp32", False, 0.1, LAYERS, GLOBAL_BATCH, JOB_STEPS)
    one, other = (
        reference_of([*job, "--seed", seed], "", FEW).merged[0].losses
        for seed in ("1", "2")
    )
    assert one != pytest.approx(other, rel=1e-3)
