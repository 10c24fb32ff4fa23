"""Multi-latent attention trains under drawn layouts as in one process."""

import random

import pytest

from tests.harness.drawn_layouts import drawn_layout, is_legal
from tests.harness.latent_jobs import EXPERTS, LATENT, RUN, SIZES, YARN
from tests.harness.layout_runs import stray
from tests.harness.tiny_jobs import TOLERANCE

pytestmark = pytest.mark.threads

STEPS = 3
LAYOUTS = 40
MODELS = {
    "experts": EXPERTS,
    "dense": ["--num-layers", "3"],
    "yarn": [*YARN, "--num-layers", "3"],
    "plain queries": ["--num-layers", "3"],
    "apart": ["--reset-attention-mask", "--reset-position-ids", "--num-layers", "3"],
}


def job_of(model: str, dropout: float) -> list[str]:
    own = LATENT[:-2] if model == "plain queries" else LATENT
    at = RUN.index("--micro-batch-size")
    rest = [*RUN[:at], *RUN[at + 2 :], "--optimizer", "sgd"]
    drops = f"--hidden-dropout {dropout} --attention-dropout {dropout}".split()
    return [*SIZES, *own, *rest, *MODELS[model], *drops, "--lr", "1e-1"]


def drawn(draw: random.Random) -> tuple[str, float, str]:
    """(model, dropout, layout)"""
    model = draw.choice([*MODELS])
    layout = drawn_layout(draw, has_experts=model == "experts")
    return model, draw.choice((0.0, 0.1)), layout


def chosen() -> list[tuple[str, float, str]]:
    draw = random.Random(5)
    found: dict[tuple[str, float, str], None] = {}
    while len(found) < LAYOUTS:
        case = drawn(draw)
        if is_legal(job_of(*case[:2]), case[2]):
            found[case] = None
    return [*found]


CASES = [
    pytest.param(*case, marks=[pytest.mark.rest] * (number >= 3))
    for number, case in enumerate(chosen())
]


@pytest.mark.parametrize("model, dropout, layout", CASES)
def test_a_drawn_layout_trains_like_one_process(model, dropout, layout):
    difference, _ = stray(job_of(model, dropout), layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference


@pytest.mark.rest
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2,sp=1,pp=2,schedule=zb-h1",
        "cp=2,comm_type=a2a,dp=2,zero=3",
        "tp=2,cp=2,ep=2,dp=2,zero=1",
        "tp=2,pp=2,recompute=full",
    ],
)
def test_further_predictions_by_latents_and_experts_train_like_in_one_process(layout):
    job = [*job_of("experts", 0.1), *"--mtp-num-layers 2 --rotary-base 500".split()]
    difference, run = stray(job, layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    depth = "mtp.layers.1.transformer_layer"
    assert f"{depth}.self_attention.linear_kv_up_proj.weight" in run.merged[1]
    assert f"{depth}.mlp.router.weight" in run.merged[1]


ADAPTED = (
    "--lora-rank 3 --lora-alpha 6 --lora-dropout 0.1 --lora-target-modules linear_q_down_proj linear_q_up_proj "
    "linear_kv_down_proj linear_kv_up_proj linear_proj"
).split()


@pytest.mark.parametrize(
    "layout, more",
    [
        ("tp=2,sp=1", []),
        pytest.param("tp=2,dp=2,zero=3", ["--use-dora"], marks=pytest.mark.rest),
        pytest.param("tp=2,sp=1,cp=2", ["--use-dora"], marks=pytest.mark.rest),
    ],
)
def test_adapters_of_all_projections_train_like_in_one_process(layout, more):
    job = [*job_of("yarn", 0.0), *ADAPTED, *more]
    difference, run = stray(job, layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference
    adapters = [name for name in run.merged[1] if ".lora_a." in name]
    assert sum("down_proj" in name for name in adapters) == 2 * 3


def test_another_scale_of_scores_would_show():
    """A layout that ignored a part of the model would differ by more than the tolerance."""
    plain = job_of("yarn", 0.0)
    other = list(plain)
    other[other.index("--mscale-all-dim") + 1] = "0.2"
    from tests.harness.layout_comparison import difference
    from tests.harness.layout_runs import run_layout

    runs = [run_layout(job, "tp=1,pp=1,dp=1", STEPS) for job in (plain, other)]
    apart = difference(runs[0].merged, runs[1].merged, runs[0].model)
    assert not apart.is_within(TOLERANCE["fp32"])
