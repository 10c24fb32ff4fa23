"""Experts that are divided over other ranks than dense layers (`--expert-tensor-parallel-size`), each layout against
one process: losses, norms of gradients, weights and the rows of each expert. The layout grid has size 1 with whatever
it combines with; here are random layouts of more tensor-parallel ranks, and sizes between and beyond.
"""

import random
import re

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run.dry_run import plan_text
from megatron_ds.extensions.dry_run.nccl_buffers import communicators
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.moe.dispatch import Groups
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.zero.data_groups import DataGroups
from tests.harness.layout_comparison import difference
from tests.harness.moe_runs import check_equal, job_of, train
from tests.harness.tiny_jobs import TOLERANCE, tiny_job
from tests.planning import test_rank_plan as rank_plans

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

FEW = 3  # steps


def job(*flags: str, style: str = "llama") -> list[str]:
    """A job whose heads, of keys too, four ranks divide."""
    words = job_of(*flags, style=style)
    if style == "llama":
        words[words.index("--num-query-groups") + 1] = "4"
    return words


KINDS = {
    "llama": job("--moe-router-load-balancing-type", "seq_aux_loss"),
    "biases": job(style="gpt2"),  # whole on the ranks that divide an expert
    "dropping": job(
        *"--moe-expert-capacity-factor 0.9 --moe-token-drop-policy position".split()
    ),
    "padded": job(
        *"--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position "
        "--moe-pad-expert-input-to-capacity".split()
    ),
    "shared": job(
        *"--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate".split()
    ),
    "muon": job("--optimizer", "muon"),
    "lamb": job("--optimizer", "lamb", style="gpt2"),
}
PADDED = "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity".split()


def random_layout(seed: int) -> tuple[str, str]:
    """(kind of job, layout) of at most 8 ranks, the kinds and the stages of ZeRO in turns."""
    draw = random.Random(seed)
    tp = draw.choice([2, 4])
    etp = draw.choice([1, tp // 2])
    sizes = [("cp", 2), ("pp", 2), ("dp", 2)]
    others = dict(draw.sample(sizes, draw.randint(0, 2 if tp == 2 else 1)))
    places = tp * others.get("cp", 1) * others.get("dp", 1) // etp
    ep = draw.choice([n for n in (1, 2, 4) if places % n == 0])
    keys = {"tp": tp, "sp": 1, "etp": etp, "ep": ep, **others, "zero": seed % 4}
    return [*KINDS][seed % len(KINDS)], ",".join(f"{k}={v}" for k, v in keys.items())


RANDOM = [random_layout(seed) for seed in range(20)]
BEYOND = [
    ("llama", "tp=2,sp=1,dp=2,etp=4,zero=1"),
    ("biases", "dp=4,etp=2,ep=2,zero=2"),
    ("dropping", "tp=2,sp=1,cp=2,dp=2,etp=4,ep=2"),
]
QUICK = 2  # cases of `make test`


@pytest.mark.parametrize(
    "kind, layout",
    [
        pytest.param(*case, marks=[pytest.mark.rest] * (number >= QUICK))
        for number, case in enumerate([*RANDOM, *BEYOND])
    ],
)
def test_a_folded_layout_trains_like_one_process(kind, layout):
    (run, seen), _ = check_equal(KINDS[kind], layout, FEW)
    keys = dict(item.split("=") for item in layout.split(","))
    parts = 2 if kind not in ("biases", "lamb") else 1
    assert seen.widths == {48 * parts // int(keys["etp"])}
    assert seen.local_experts == {4 // int(keys.get("ep", 1))}
    named = {axes for each in run.seen for _, axes, _ in each.traffic.calls}
    assert ("etp" in named) == (int(keys["etp"]) > 1)


def test_the_random_layouts_have_all_sizes():
    """At 2 and 4 tensor-parallel ranks whole experts, and halves at 4; experts over tensor-parallel ranks."""
    layouts = [dict(item.split("=") for item in text.split(",")) for _, text in RANDOM]
    assert {(keys["tp"], keys["etp"]) for keys in layouts} == {
        ("2", "1"),
        ("4", "1"),
        ("4", "2"),
    }
    assert {keys["zero"] for keys in layouts} == set("0123")
    assert all(any(axis in keys for keys in layouts) for axis in ("cp", "pp", "dp"))
    spanning = [k for k in layouts if int(k["ep"]) > int(k.get("dp", 1))]
    assert len(spanning) > 4


@pytest.mark.parametrize("kind", ["biases", "lamb"])
def test_a_norm_of_other_ranks_would_show(kind, monkeypatch):
    """The norm is wrong if what all ranks of an expert hold is counted by the first tensor-parallel rank."""
    layout = "tp=2,sp=1,etp=1,ep=2,zero=0"
    reference, _ = train(KINDS[kind], "mbs=1", FEW)
    monkeypatch.setattr(DataGroups, "dividing", lambda self, axes: self.tp)
    run, _ = train(KINDS[kind], layout, FEW)
    apart = difference(run.merged, reference.merged, run.model)
    assert not apart.is_within(TOLERANCE["fp32"]), apart


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize(
    "layout, flags",
    [
        pytest.param("tp=2,sp=1,dp=2,etp=1,ep=2,zero=1", ["--optimizer", "muon"]),
        *(
            pytest.param(*case, marks=pytest.mark.rest)
            for case in (
                ("tp=2,sp=1,etp=1,ep=2,zero=0", ["--optimizer", "lamb"]),
                ("tp=4,sp=1,etp=2,ep=2,zero=2", []),
                ("tp=4,sp=1,dp=2,etp=1,ep=2,zero=3", []),
                ("tp=2,sp=1,cp=2,pp=2,etp=1,ep=4,zero=1,recompute=full", []),
                ("tp=4,sp=1,pp=2,etp=2,ep=1,zero=2", ["--optimizer", "muon"]),
            )
        ),
    ],
)
def test_every_rank_sends_and_holds_what_was_planned(layout, flags):
    """Rows of padded experts do not depend on the data."""
    dense = tiny_job("gpt2", "fp32", False, 0.0, 4, rank_plans.BATCH, rank_plans.STEPS)
    experts = ["--num-experts", "4", "--moe-ffn-hidden-size", "48", *PADDED]
    late = ["--lr-warmup-iters", "0"] if "muon" in flags else []
    rank_plans.check([*dense, *experts, *flags, *late], layout)


def planned(*flags: str, ranks: int):
    """The plan of rank 0 of a bf16 model with experts of 48 channels."""
    job = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --lr 1 "
        "--train-iters 1 --mock-data --swiglu --disable-bias-linear --normalization RMSNorm --bf16 "
        "--position-embedding-type rope --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
        "--micro-batch-size 4 --sequence-parallel"
    )
    return plan_world(parse([*job.split(), *flags], world_size=ranks), 0, "cpu")


def test_whole_experts_send_what_the_closed_form_says():
    """A rank sends (ep-1)/ep of its T k rows, there and back, in forward and backward. Experts in halves move t-1
    times as many rows among their ranks in each direction; whole ones none."""
    sizes = "--tensor-model-parallel-size 2 --expert-model-parallel-size".split()
    whole = planned(*sizes, "4", "--expert-tensor-parallel-size", "1", ranks=4)
    halves = planned(*sizes, "2", ranks=4)
    layers, rows, row = 2, 4 * 16 // 2 * 2, 32 * 2  # of a rank; bytes of a row
    of_whole = whole.rank_plan(0).traffic.bytes
    of_halves = halves.rank_plan(0).traffic.bytes
    assert of_whole["all_to_all_v", "ep", 4] == layers * 4 * rows * 3 // 4 * row
    assert of_halves["all_to_all_v", "ep", 2] == layers * 4 * rows // 2 * row
    assert not {key for key in of_whole if key[1] == "etp"}
    gathered = ("all_gather", "tp", 2), ("reduce_scatter", "tp", 2)
    assert any(of_halves[key] > of_whole[key] for key in gathered)
    assert sum(whole.rank_plan(0).traffic.wire_bytes().values()) < sum(
        halves.rank_plan(0).traffic.wire_bytes().values()
    )


def test_a_dry_run_names_the_ranks_that_divide_an_expert():
    sizes = "--tensor-model-parallel-size 4 --expert-model-parallel-size 4".split()
    plan = planned(*sizes, "--expert-tensor-parallel-size", "2", ranks=8)
    text = plan_text(plan, [])
    assert re.search(r"expert tensor \(etp\) +2 +4  0, 1\n", text)
    assert "(expert-tensor 2 × expert-parallel 4 × expert-data 1)" in text
    # Each rank has 4 · 16 · 2 / 4 rows, and those of its peer.
    assert "for a micro-batch: 64, with equal loads" in text
    found = communicators(plan.rank_plan(0), plan.config, plan.grid, {})
    of_two = [one.operations for one in found if one.size == 2]
    # Numbers of rows are gathered, and rows sent, over the ranks of an expert.
    assert {"all_gather", "send"} in of_two and {"all_reduce"} in of_two


# ------------------------------------------------------------------ equal tokens
def test_ranks_with_equal_tokens_are_refused():
    flags = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    flags += ["--micro-batch-size", "1"]
    with pytest.raises(ConfigError, match="Add --sequence-parallel, or remove"):
        parse([*KINDS["llama"], *flags], world_size=2)
    config = parse([*KINDS["llama"], *flags, "--sequence-parallel"], world_size=2)
    mesh = fake_mesh(config.grid(), 0, "cpu")
    assert Groups.of(ParallelContext(mesh, sequence_parallel=True)).tp.size == 1
    with pytest.raises(ConfigError, match="which have equal tokens"):
        Groups.of(ParallelContext(mesh))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 3", "neither"),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 8",
            "Start a multiple of 8 ranks",
        ),
        (
            "--expert-tensor-parallel-size 2 " + " ".join(PADDED),
            "remove --moe-pad-expert-input-to-capacity",
        ),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --optimizer onebit_adam",
            "Remove --expert-tensor-parallel-size",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(flags, message):
    given = ["--sequence-parallel", "--micro-batch-size", "1"]
    with pytest.raises(ConfigError, match=message):
        parse([*KINDS["llama"], *flags.split(), *given], world_size=4)
