"""Experts in evaluation and generation: a capacity of its own, no noise, no counting, text as of whole
forwards."""

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.models import MODELS, build_stage, run_layers
from megatron_ds.models.generation import Ending, Sampling, generate
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.tensor_parallel.init import initialize
from megatron_ds.training.build import build_engine
from megatron_ds.training.step import evaluate, train_step
from tests.harness.layout_comparison import mock_samples, open_loader, parse_layout
from tests.harness.layout_runs import GLOBAL_BATCH
from tests.harness.model_runs import context_of
from tests.harness.moe_runs import job_of, model_of
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

NOISE = (
    "--moe-router-noise gumbel --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 0.6"
).split()


def evaluated(job, layout, steps=2):
    """(an evaluation after some steps, whether it left all routers as they were)."""
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *request.flags], world_size=request.world_size)
    samples = mock_samples(config, 4 * GLOBAL_BATCH, seed=1)

    def main(rank, world):
        mesh = Mesh(
            config.grid(request.world_size), rank, world.connect, torch.device("cpu")
        )
        engine = build_engine(config, mesh)
        loader = open_loader(config, samples, mesh)
        for step in range(steps):
            progress = Progress(step=step, samples=step * GLOBAL_BATCH)
            train_step(
                engine,
                engine.batches.training(loader, progress, GLOBAL_BATCH),
                progress,
                learning_rate=1e-3,
                weight_decay=0.0,
            )
        memory = lambda: {
            piece.spec.name: piece.tensor.clone()
            for piece in engine.step_state.pieces()
        }
        before = memory()
        result = evaluate(
            engine, loader, first_sample=0, iterations=2, global_batch_size=GLOBAL_BATCH
        )
        loader.close()
        tallies = [balance.tally.sum().item() for balance in engine.step_state.balances]
        moved = any(t.any() for t in before.values())
        assert moved if steps > 1 else steps or not moved, (
            "steps move a bias; one may find equal loads"
        )
        return result, all(
            torch.equal(before[n], t) for n, t in memory().items()
        ) and not any(tallies)

    ranks = run_ranks(request.world_size, main)
    assert all(result.loss == ranks[0][0].loss for result, _ in ranks)
    return ranks[0][0], all(same for _, same in ranks)


@pytest.mark.parametrize(
    "limit", [[], ["--moe-eval-capacity-factor", "0.8"]], ids=["dropless", "limited"]
)
def test_evaluation_has_its_own_capacity_no_noise_no_losses_and_leaves_routers_as_they_are(
    limit,
):
    job = job_of(*NOISE, *limit, without=("--eod-mask-loss",))
    (result, is_same) = evaluated(job, "mbs=1")
    assert is_same, "evaluation moved a bias, or counted"
    assert not any("balancing" in name for name in result.metrics)
    dropped = [mean for name, mean in result.metrics.items() if "dropped" in name]
    assert all(mean > 0 for mean in dropped) and bool(dropped) == bool(limit)
    for layout in ("tp=2,sp=1,dp=2,ep=2,mbs=2", "dp=4,ep=4,zero=3"):
        other, is_same = evaluated(job, layout)
        assert is_same and other.loss == pytest.approx(result.loss, rel=1e-6)
        for name in result.metrics:
            if "dropped" in name:
                assert other.metrics[name] == pytest.approx(
                    result.metrics[name], rel=1e-9
                )


def test_evaluation_has_no_noise():
    quiet = [flag for flag in NOISE if flag not in ("--moe-router-noise", "gumbel")]
    noisy, plain = (
        evaluated(job_of(*flags), "mbs=1", steps=0)[0].loss for flags in (NOISE, quiet)
    )
    assert noisy == plain
    noisy, plain = (
        evaluated(job_of(*flags), "mbs=1", steps=1)[0].loss for flags in (NOISE, quiet)
    )
    assert noisy != plain, "training has noise"


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@torch.no_grad()
def test_greedy_text_with_a_cache_is_the_argmax_of_whole_forwards(style):
    """In evaluation experts take all tokens, so a token alone is routed as within its text."""
    config = model_of(
        job_of(*NOISE, "--moe-shared-expert-intermediate-size", "16", style=style)
    )
    prompt, count = [3, 1, 36, 1, 5], 9

    def main(rank, world):
        tp = world.group("tp", tuple(range(world.size)), rank)
        model = build_stage(MODELS["gpt"](config, context_of(tp)))
        initialize(model.parameters(), 3, {"tp": (tp.rank, tp.size)})
        return list(
            generate(
                model,
                prompt,
                ending=Ending(count),
                sampling=Sampling(temperature=0),
                tp=tp,
                vocab_size=config.vocab_size,
            )
        ), model

    ((cached, model),) = run_ranks(1, main)
    text = list(prompt)
    for _ in range(count):
        logits = run_layers(model, None, whole_batch(text))[-1, 0, : config.vocab_size]
        text.append(int(logits.argmax()))
    assert cached == text[len(prompt) :] and len(set(cached)) > 2
    assert [tokens for tokens, _ in run_ranks(2, main)] == [cached] * 2


def whole_batch(text):
    ids = torch.tensor([text])
    return Batch(
        ids,
        ids,
        torch.ones(ids.shape),
        torch.arange(len(text))[None],
        sample_ids=(0,),
        training=False,
        ledger=DISCARDING,
    )
