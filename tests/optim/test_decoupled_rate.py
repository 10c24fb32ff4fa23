"""--decoupled-lr: word embeddings and output layers are updated with a learning rate of their own."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_learning_rates
from megatron_ds.progress.ramps import Progress
from tests.harness.layout_runs import GLOBAL_BATCH, NUM_LAYERS, reference_of
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.threads

VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight"}
FEW, ONE = 4, "tp=1,pp=1,dp=1"


def job_of(style, untied, *flags):
    return [
        *tiny_job(style, "fp32", untied, 0.0, NUM_LAYERS, GLOBAL_BATCH, FEW),
        *flags,
    ]


@pytest.mark.parametrize(
    "style, untied", [("gpt2", False), ("llama", True), ("bert", False)]
)
def test_a_step_moves_the_vocabulary_by_its_own_rate_and_nothing_else_differently(
    style, untied
):
    job = job_of(style, untied, "--optimizer", "sgd", "--lr-warmup-iters", "0")
    (_, start), (_, plain), (_, decoupled) = (
        reference_of([*job, *flags], ONE, steps).merged
        for flags, steps in (([], 0), ([], 1), (["--decoupled-lr", "4e-3"], 1))
    )
    moves = {name for name in start if not torch.equal(plain[name], decoupled[name])}
    assert moves == VOCABULARY & set(start)
    for name in moves:
        moved, other = plain[name] - start[name], decoupled[name] - start[name]
        # Differences of weights of about 0.1 in fp32.
        torch.testing.assert_close(other, 4 * moved, rtol=1e-3, atol=5e-8)
        assert moved.abs().max() > 1e-5


def test_both_rates_warm_up_and_decay_together_between_their_own_limits():
    """Megatron: warm-up to the maximum, then minimum + coefficient * (maximum - minimum)."""
    flags = "--train-iters 12 --lr-decay-style linear --decoupled-lr 1e-2 --decoupled-min-lr 2e-3"
    config = parse(
        [*job_of("gpt2", False), *flags.split(), "--micro-batch-size", "1"],
        world_size=1,
    )
    rates = make_learning_rates(config)
    at = lambda name: [
        rates[name](Progress(scheduled_samples=i * GLOBAL_BATCH)) for i in range(12)
    ]
    main, own = at("main"), at("decoupled")
    assert main[:3] == pytest.approx([0, 5e-4, 1e-3]) and own[:3] == pytest.approx(
        [0, 5e-3, 1e-2]
    )
    for rate, other in zip(main[2:], own[2:]):
        assert (other - 2e-3) / 8e-3 == pytest.approx((rate - 1e-4) / 9e-4)
    assert own[-1] == pytest.approx(2e-3 + 0.1 * 8e-3)
