"""The parts that ranks keep: together the whole values, and what is set in them is applied."""

import pytest
import torch

from megatron_ds.compat.deepspeed import utils
from megatron_ds.errors import ConfigError
from tests.harness.engine_runs import Stack, batches, config_of, loss_of, make, on_ranks

pytestmark = pytest.mark.threads


def one_backward(engine, rank):
    [[tokens]] = batches(1, 1, 2, rank)
    engine.backward(loss_of(engine, tokens))


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_all_ranks_make_the_whole(stage):
    def main(engine, rank):
        one_backward(engine, rank)
        parameters = list(engine.module.parameters())
        grads = [
            (utils.safe_get_full_grad(p), utils.safe_get_local_grad(p))
            for p in parameters
        ]
        engine.step()
        weights = [
            (utils.safe_get_full_fp32_param(p), utils.safe_get_local_fp32_param(p))
            for p in parameters
        ]
        moments = [
            (
                utils.safe_get_full_optimizer_state(p, "exp_avg"),
                utils.safe_get_local_optimizer_state(p, "exp_avg"),
            )
            for p in parameters
        ]
        return [*grads, *weights, *moments]

    first, second = on_ranks(2, main, lambda: make(Stack), config_of(stage, 2))
    for (whole, left), (_, right) in zip(first, second):
        assert torch.equal(torch.cat([left, right]), whole.reshape(-1))


def test_what_is_set_in_parts_is_applied_and_read_back():
    def main(engine, rank):
        one_backward(engine, rank)
        p = next(p for p in engine.module.parameters() if p.dim() == 2)
        part = utils.safe_get_local_grad(p)
        utils.safe_set_local_grad(p, torch.full_like(part, 0.5))
        assert utils.safe_get_full_grad(p).unique().tolist() == [0.5]
        with pytest.raises(ConfigError, match=f"for a part of {part.numel()}"):
            utils.safe_set_local_grad(p, torch.zeros(part.numel() + 1))
        engine.step()
        moment = utils.safe_get_full_optimizer_state(p, "exp_avg")
        assert moment.unique().numel() == 1 and moment.min() > 0
        utils.safe_set_local_optimizer_state(p, torch.full_like(part, 2.0), "exp_avg")
        utils.safe_set_local_fp32_param(p, torch.full_like(part, 3.0))
        assert utils.safe_get_full_optimizer_state(p, "exp_avg").unique().tolist() == [
            2.0
        ]
        assert p.ds_tensor.unique().tolist() in ([3.0], [])
        with engine.gathered_parameters():
            return p.detach().unique().tolist()

    assert on_ranks(2, main, lambda: make(Stack), config_of(3, 2)) == [[3.0], [3.0]]


def test_a_frozen_parameter_has_no_part():
    def frozen():
        module = make(Stack)
        next(module.parameters()).requires_grad_(False)
        return module

    def main(engine, rank):
        one_backward(engine, rank)
        p = next(engine.module.parameters())
        return [
            utils.safe_get_local_grad(p),
            utils.safe_get_local_fp32_param(p),
            utils.safe_get_full_fp32_param(p),
            utils.safe_get_full_optimizer_state(p, "exp_avg"),
        ]

    assert on_ranks(2, main, frozen, config_of(3, 2)) == [[None] * 4] * 2
