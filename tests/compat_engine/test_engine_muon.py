"""DeepSpeed's type Muon in an engine, against torch's Muon and AdamW in one process."""

import pytest
import torch

from megatron_ds.errors import ConfigError
from tests.compat_engine.test_engine_optimizers import plainly
from tests.harness.engine_runs import (
    STEPS,
    Stack,
    config_of,
    make,
    on_ranks,
    train,
    weights,
)

pytestmark = pytest.mark.threads

PARAMS = {
    "lr": 0.01,
    "muon_lr": 0.05,
    "adam_lr": 0.004,
    "weight_decay": 0.1,
    "eps": 1e-4,
}


def config(stage, ranks, **params):
    return config_of(
        stage, ranks, optimizer={"type": "Muon", "params": {**PARAMS, **params}}
    )


class Both:
    """torch's optimizers, as one."""

    def __init__(self, module):
        names = {name: p for name, p in module.named_parameters()}
        matrices = [
            p for name, p in names.items() if p.dim() == 2 and "embed" not in name
        ]
        rest = [p for p in names.values() if all(p is not other for other in matrices)]
        self.both = (
            torch.optim.Muon(
                matrices, lr=0.05, momentum=0.95, weight_decay=0.1, nesterov=True
            ),
            torch.optim.AdamW(
                rest, lr=0.004, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1
            ),
        )
        self.param_groups = []

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.both:
            optimizer.step()


@pytest.mark.parametrize("stage, ranks", [(0, 1), (1, 2), (3, 2)])
def test_an_engine_trains_as_with_torch_alone(stage, ranks, monkeypatch):
    """Whose iterations are in bf16, but for this test."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    expected, _ = plainly(Both, ranks=ranks)

    def main(engine, rank):
        train(engine, rank, STEPS)
        rates = [
            (len(group["params"]), group["lr"])
            for group in engine.optimizer.param_groups
        ]
        assert rates == [(7, 0.05), (len(expected.state_dict()) - 7, 0.004)]
        return weights(engine)

    for found in on_ranks(ranks, main, lambda: make(Stack), config(stage, ranks)):
        for name, p in expected.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_what_muon_cannot_update_is_an_error():
    for module, params, says in (
        (lambda: torch.nn.LayerNorm(4), {}, "none of 2 parameters is the 2-D weight"),
        (lambda: make(Stack), {"per_head_muon": True}, "needs the heads of each"),
    ):
        with pytest.raises(ConfigError, match=says):
            on_ranks(1, lambda engine, rank: None, module, config(0, 1, **params))
