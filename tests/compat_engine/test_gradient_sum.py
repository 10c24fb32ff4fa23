""" "gradient_allreduce_op": the sum over ranks is the mean times their number."""

import pytest
import torch

from megatron_ds.compat.deepspeed import utils
from megatron_ds.errors import ConfigError
from tests.harness.engine_runs import Stack, batches, config_of, loss_of, make, on_ranks

pytestmark = pytest.mark.threads


def config(stage, operation, lr):
    sgd = {"type": "SGD", "params": {"lr": lr}}
    more = {
        "optimizer": sgd,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": operation,
    }
    return config_of(stage, 2, 2, **more)


def one_update(engine, rank):
    """(gradients that the update applies, weights after it)"""
    [microbatches] = batches(1, 2, 2, rank)
    for tokens in microbatches:
        engine.backward(loss_of(engine, tokens))
        if engine.is_gradient_accumulation_boundary():
            grads = [
                utils.safe_get_full_grad(p).clone() for p in engine.module.parameters()
            ]
        engine.step()
    return grads, engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_sum_moves_weights_as_the_mean_with_twice_the_rate(stage):
    made = lambda: make(Stack)
    found = on_ranks(2, one_update, made, config(stage, "SUM", 0.25))
    expected = on_ranks(2, one_update, made, config(stage, "mean", 0.5))
    # Factors of two change no bit.
    for (sums, weights), (means, others) in zip(found, expected):
        assert all(torch.equal(s, 2 * m) for s, m in zip(sums, means))
        assert all(torch.equal(w, others[name]) for name, w in weights.items())


def test_loss_backward_sums_too():
    def main(engine, rank):
        [microbatches] = batches(1, 2, 2, rank)
        for tokens in microbatches:
            loss_of(engine, tokens).backward()
            engine.step()
        return engine.full_state_dict()

    found = on_ranks(2, main, lambda: make(Stack), config(0, "sum", 0.25))
    expected = on_ranks(2, one_update, lambda: make(Stack), config(0, "sum", 0.25))
    for weights, (_, others) in zip(found, expected):
        for name, w in weights.items():
            # Each contribution is multiplied instead of the loss.
            torch.testing.assert_close(w, others[name], rtol=1e-6, atol=1e-7)


def test_another_operation_is_an_error():
    with pytest.raises(ConfigError, match="'max': gradients .* Use mean or sum"):
        on_ranks(1, one_update, lambda: make(Stack), config(0, "max", 0.5))
