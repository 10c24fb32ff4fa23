"""The z-loss of logits that ranks share, and its gradient, against whole logits in plain torch; and whole runs."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.config.parse import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.z_loss.normalized_loss import NormalizedTokens
from megatron_ds.tensor_parallel.linear import column_linear
from megatron_ds.tensor_parallel.logits_in_chunks import LogitsInChunks
from megatron_ds.tensor_parallel.logits_in_parts import losses_of
from megatron_ds.training.pretrain import KNOWN_NAMES, RULES
from tests.harness.engines import config_of, on_engines, train
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

S, B, V, WIDTH = 6, 2, 21, 5
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 9 "
    "--lr 1e-3 --mock-data --vocab-size 61"
)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
X, W = randn(S, B, WIDTH, seed=2), randn(V, WIDTH, seed=3)
DLOSSES = randn(2, S, B, seed=6)


def on_ranks(ranks, padded, chunks):
    """(losses [2, s, b], dx, dw), with padding whose values must not matter."""

    def main(rank, world):
        group = world.group("tp", tuple(range(ranks)), rank)
        padding = torch.full((padded - V, WIDTH), 3.0)
        weight = torch.cat([W, padding]).chunk(ranks)[rank].clone().requires_grad_()
        x = X.clone().requires_grad_()
        loss = NormalizedTokens(LABELS.reshape(-1), len(weight), group, V)
        if chunks:
            logits = LogitsInChunks(x, weight, None, group, False, chunks, None)
        else:
            logits = column_linear(x, weight, None, group, False)
        losses = losses_of(logits, loss)
        losses.backward(DLOSSES)
        return losses.detach(), x.grad, weight.grad

    found = run_ranks(ranks, main)
    for losses, *_ in found:
        assert torch.equal(losses, found[0][0])
    return found[0][0], found[0][1], torch.cat([f[2] for f in found])[:V]


def in_plain_torch():
    x, weight = X.double().requires_grad_(), W.double().requires_grad_()
    logits = x @ weight.t()
    language = F.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    ).view(S, B)
    losses = torch.stack([language, logits.logsumexp(-1).square()])
    losses.backward(DLOSSES.double())
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunks", [0, 3])
@pytest.mark.parametrize("ranks, padded", [(1, 21), (2, 24), (4, 32)])
def test_losses_and_gradients_are_those_of_plain_torch(ranks, padded, chunks):
    for mine, plain in zip(on_ranks(ranks, padded, chunks), in_plain_torch()):
        torch.testing.assert_close(mine.double(), plain, rtol=2e-5, atol=2e-5)


def job_of(strength):
    return [
        *tiny_job("llama", "fp32", True, 0.0, 2, GLOBAL_BATCH, 3),
        "--z-loss-strength",
        str(strength),
    ]


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,pp=2"])
@pytest.mark.parametrize("strength", [0, 0.1])
def test_a_model_without_weights_has_the_loss_of_the_closed_form(layout, strength):
    """All logits are 0: Z is the number of tokens V, and the loss log V + A log² V."""
    config = config_of([*job_of(strength), "--init-method-std", "0"], layout)
    log_v = math.log(config.model.vocab_size)
    for losses in on_engines(config, lambda engine: train(engine, range(1))):
        assert losses == pytest.approx([log_v + strength * log_v**2], rel=1e-6)


@pytest.mark.parametrize("layout", ["tp=2,pp=2,zero=1", "dp=2,cp=2,zero=3"])
def test_a_run_trains_like_one_process(layout):
    difference, _ = stray(job_of(0.1), layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), difference


@pytest.mark.parametrize(
    "words, says",
    [
        ("--z-loss-strength 1e-4 --label-smoothing 0.1", "bound the logits already"),
        ("--z-loss-strength -1", "at least 0"),
        ("--z-loss-strength 1e-4 --distill-from x", "each replace the loss"),
    ],
)
def test_what_does_not_fit_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        parse(f"{RUN} {words}".split(), 1, known=KNOWN_NAMES, rules=RULES, env={})


def test_the_switch_of_the_fork_has_its_strength():
    config = parse(f"{RUN} --use-z-loss".split(), 1, env={})
    assert config.get("z_loss.z_loss_strength") == 1e-4
    assert config.objective is not None
    assert parse(RUN.split(), 1, env={}).objective is None
