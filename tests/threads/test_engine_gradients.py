"""Gradients between backward and step: when they are dropped, where a program sees and changes them."""

import pytest
import torch

from tests.harness.engine_runs import (
    STEPS,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)


# ------------------------------------------------------------------------------------------------- zero_grad
@pytest.mark.parametrize("caller", ["engine", "optimizer"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_anywhere_in_the_loop_changes_nothing(stage, caller, caplog):
    def main(engine, rank):
        zero = (engine if caller == "engine" else engine.optimizer).zero_grad
        for microbatches in batches(STEPS, 3, 2, rank):
            for tokens in microbatches:
                zero()
                loss = loss_of(engine, tokens)
                zero()
                engine.backward(loss)
                zero()
                engine.step()
                zero()
        return engine.global_steps, weights(engine)

    config = config_of(stage, 2, accumulation=3)
    expected = on_ranks(2, lambda engine, rank: (train(engine, rank), weights(engine)), lambda: make(Stack),
                        config)
    for (steps, found), (_, other) in zip(on_ranks(2, main, lambda: make(Stack), config), expected):
        assert steps == STEPS and all(torch.equal(p, other[name]) for name, p in found.items())
    assert caplog.text.count("in the middle of an update has no effect") == 2      # once for each rank
