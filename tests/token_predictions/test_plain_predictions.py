"""The losses of further depths, and all gradients, are those of the formulas on whole tensors."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.models import MODELS, count_uses, run_layers
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.pipeline.stage import Stage
from tests.harness.gpt_runs import make_batch, run_gpt
from tests.harness.gradients import accumulated, install
from tests.harness.model_runs import context_of, make_model
from tests.harness.plain_gpt import ALIBI, FAMILIES, STYLES
from tests.harness.plain_predictions import (
    plain_losses,
    plain_objective,
    prediction_weights,
)

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

LLAMA = replace(STYLES["llama"], mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
TIED = replace(LLAMA, untie_embeddings_and_output_weights=False)
CASES = {
    "llama": LLAMA,
    "tied": TIED,
    "one depth": replace(TIED, mtp_num_layers=1),
    "alibi": replace(ALIBI, mtp_num_layers=2),
    "biases, multipliers, a window and caps": replace(
        TIED,
        normalization="LayerNorm",
        add_bias_linear=True,
        output_layer_bias=True,
        embedding_multiplier=2.5,
        logit_multiplier=0.6,
        window_size=(3, 0),
        final_logit_softcapping=1.5,
    ),
    "gemma 3": replace(FAMILIES["gemma 3"], mtp_num_layers=2),
}
DOCUMENTS = torch.tensor(
    [[0] * 4 + [1] * 6, [0] * 9 + [1], [0, 1, 1, 2, 2, 2, 2, 3, 3, 3]]
)


def in_float32(weights):
    return {name: tensor.float() for name, tensor in weights.items()}


def gradients_of(config, weights, batch, per_token=False):
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    objective = plain_objective(leaves, config, batch, per_token)
    objective.backward()
    return objective.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "documents apart"])
@pytest.mark.parametrize("tp, sp", [(1, False), (2, True)])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_formulas(name, tp, sp, apart):
    config = CASES[name]
    weights = prediction_weights(config, 3)
    batch = make_batch(config, document_ids=DOCUMENTS if apart else None)
    loss, _, gradients = run_gpt(
        config, in_float32(weights), batch, tp, sequence_parallel=sp
    )
    objective, expected = gradients_of(config, weights, batch)
    assert loss.objective.item() == pytest.approx(objective.item(), rel=1e-5)
    means = {entry.name: entry.value / entry.count for entry in loss.entries}
    plain = plain_losses(weights, config, batch)
    for k in range(1, config.mtp_num_layers + 1):
        total, count = plain[k]
        assert means[f"mtp {k} loss"].item() == pytest.approx(
            float(total / count), rel=1e-5
        )
    assert gradients.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for parameter, grad in gradients.items():
        torch.testing.assert_close(
            grad.double(), expected[parameter], rtol=1e-5, atol=1e-5 * largest
        )


def test_tokens_weigh_alike_with_losses_per_token():
    """Megatron divides the sum of all losses by the tokens of the main loss."""
    weights = prediction_weights(TIED, 3)
    batch = make_batch(TIED, document_ids=DOCUMENTS)
    model = make_model("gpt", TIED, solo("tp"), in_float32(weights))
    ledger = Ledger(batch.counted_by_sequence)
    noted = batch.with_ledger(ledger)
    logits = run_layers(model, None, noted)
    tp = context_of().tp
    vocabulary = {"tp": tp, "vocab_size": TIED.vocab_size, "per_token": True}
    loss = MODELS["gpt"].loss(logits, noted, **vocabulary)
    terms = [
        (entry.value * entry.gradient(1.0, batch.counted_tokens))
        for entry in ledger.take()
    ]
    (loss.objective + sum(terms)).backward()
    _, expected = gradients_of(TIED, weights, batch, per_token=True)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for p in model.parameters():
        rows = p.spec.shape[0]
        torch.testing.assert_close(
            p.grad[:rows].double(),
            expected[p.spec.name],
            rtol=1e-5,
            atol=1e-5 * largest,
        )


def test_without_depths_the_model_has_no_more_weights_and_another_loss():
    off = replace(TIED, mtp_num_layers=0)
    weights = in_float32(prediction_weights(TIED, 3))
    batch = make_batch(TIED)
    on = run_gpt(TIED, weights, batch)
    plain = run_gpt(off, weights, batch)
    further = {name for name in on[2] if name.startswith("mtp.")}
    assert further and plain[2].keys() == on[2].keys() - further
    assert not [entry for entry in plain[0].entries if entry.name.startswith("mtp")]
    assert on[0].objective.item() > plain[0].objective.item() + 0.1
    assert torch.equal(on[1], plain[1])


def test_depths_are_computed_in_training_alone():
    """In an evaluation nothing is added to the ledger, and no depth is run."""
    weights = in_float32(prediction_weights(TIED, 3))
    model = make_model("gpt", TIED, solo("tp"), weights)
    runs = []
    for depth in model[-1].depths:
        depth.register_forward_hook(lambda *given: runs.append(1))
    for training in (True, False):
        ledger = Ledger()
        batch = replace(make_batch(TIED), training=training, ledger=ledger)
        run_layers(model, None, batch)
        assert len(ledger.take()) == (2 if training else 0)
        assert len(runs) == 2


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("config", [TIED, LLAMA], ids=["tied", "untied"])
def test_every_use_of_a_shared_weight_is_registered(config, recompute):
    """A bucket is reduced when as many gradients have come as uses are registered, and no earlier."""
    weights = in_float32(prediction_weights(config, 1))
    batch = make_batch(config)
    _, _, gradients = run_gpt(config, weights, batch)
    model = make_model(
        "gpt", config, solo("tp"), weights, recompute_granularity=recompute
    )
    ready = dict.fromkeys(model.parameters(), 0)

    def accumulate(p):  # what the gradient buckets do for parameters autograd serves
        if p.grad is not None:
            accumulator_of(p).add(p.grad)
            p.grad = None

    for p in ready:
        count = lambda p=p: ready.__setitem__(p, ready[p] + 1)
        install(p, torch.zeros_like(p), count)
        p.register_post_accumulate_grad_hook(accumulate)
    stage = Stage(0, list(model), is_first=True, is_last=True, loss=loss_of(config))
    stage.forward(0, batch, None, 1.0)
    stage.backward(0, None)
    assert ready == count_uses(model)
    named = {p.spec.name: p for p in ready}
    words = ready[named["embedding.word_embeddings.weight"]]
    depths = config.mtp_num_layers
    unties = config.untie_embeddings_and_output_weights
    assert words == (1 + depths if unties else 2 * (1 + depths))
    if unties:
        assert ready[named["output_layer.weight"]] == 1 + depths
    for name, p in named.items():
        rows = p.spec.shape[0]
        torch.testing.assert_close(
            accumulated(p)[:rows], gradients[name], rtol=1e-5, atol=1e-6
        )


def loss_of(config):
    tp = context_of().tp
    return partial(MODELS["gpt"].loss, tp=tp, vocab_size=config.vocab_size)
