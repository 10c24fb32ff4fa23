"""A model cut into stages computes what the whole one does; tied copies and gradient counts are as
promised."""

import pytest
import torch

from megatron_ds.models import MODELS, build_stage, count_uses, gpt_loss, run_layers
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.managed_parameter import accumulator_of
from tests.harness.gpt_runs import make_batch, make_model, run_gpt
from tests.harness.gradients import accumulated, install
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import STYLES, load_logical, logical_weights

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_stages_in_a_row_equal_the_whole_model(style, cuts):
    config, tp = STYLES[style], solo("tp")
    weights, batch = logical_weights(config, seed=1), make_batch(config)
    loss, logits, grads = run_gpt(config, weights, batch)
    layers = MODELS["gpt"](config, context_of(tp))
    bounds = (0, *cuts, len(layers))
    stages = [build_stage(layers[a:b]) for a, b in zip(bounds, bounds[1:])]
    x, found = None, {}
    for stage in stages:
        load_logical(stage.parameters(), weights, tp)
        x = run_layers(stage, x, batch)
    result = gpt_loss(x, batch, tp=tp, vocab_size=config.vocab_size)
    result.objective.backward()
    for p in (p for stage in stages for p in stage.parameters()):
        found[p.spec.name] = found.get(p.spec.name, 0) + p.grad[: p.spec.shape[0]]
    assert result.objective.item() == loss.objective.item()
    assert set(found) == set(grads)
    for name in grads:  # a tied weight sums its two gradients in another order
        torch.testing.assert_close(found[name], grads[name], rtol=1e-5, atol=1e-7)


def test_a_tied_head_on_another_stage_holds_a_copy_that_says_so():
    layers = MODELS["gpt"](STYLES["gpt2"], context_of())
    first, last = build_stage(layers[:3]), build_stage(layers[3:])
    source, copy = first[0].weight.spec, last[-1].weight.spec
    assert source.name == copy.name and source.tied == copy.tied is not None
    assert (source.tied_copy, copy.tied_copy) == (False, True)
    assert source.shape == copy.shape and source.init == copy.init
    whole = build_stage(layers)
    assert whole[0].weight is whole[-1].weight and whole[0].weight.spec.tied is None


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("style", STYLES)
def test_gradients_reach_main_grad_as_often_as_count_uses_says(style, recompute):
    config = STYLES[style]
    weights, batch = logical_weights(config, seed=1), make_batch(config)
    _, _, grads = run_gpt(config, weights, batch)
    model = make_model(config, solo("tp"), weights, recompute_granularity=recompute)
    ready = {p: 0 for p in model.parameters()}

    def accumulate(p):  # what the gradient buckets do for parameters autograd serves
        if p.grad is not None:  # None: the layer has added its gradient itself
            accumulator_of(p).add(p.grad)
            p.grad = None

    for p in ready:
        count = lambda p=p: ready.__setitem__(p, ready[p] + 1)
        install(p, torch.zeros_like(p), count)
        p.register_post_accumulate_grad_hook(accumulate)
    gpt_loss(
        run_layers(model, None, batch),
        batch,
        tp=solo("tp"),
        vocab_size=config.vocab_size,
    ).objective.backward()
    assert ready == count_uses(model)
    assert max(ready.values()) == (2 if style == "gpt2" else 1)
    for p in ready:
        torch.testing.assert_close(
            accumulated(p)[: p.spec.shape[0]], grads[p.spec.name], rtol=1e-5, atol=1e-7
        )
        assert p.grad is None
