"""Patterns of names in an engine's JSON: groups with their own rate, weight decay and optimizer."""

import pytest
import torch

from megatron_ds.errors import ConfigError
from tests.compat_engine.test_engine_optimizers import plainly
from tests.harness.engine_runs import (
    EPS,
    STEPS,
    Stack,
    config_of,
    make,
    on_ranks,
    train,
    weights,
)

pytestmark = pytest.mark.threads

PARAMS = {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}
RULES = [
    "*.up.weight:lr_factor=2",
    "*.down.?ia*:decay=off",
    "head.weight:optimizer=adagrad,lr_factor=0.5",
]
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "warmup_type": "linear"},
}


def config(stage, ranks, rules, **more):
    optimizer = {"type": "AdamW", "params": PARAMS, "param_groups": rules}
    return config_of(stage, ranks, optimizer=optimizer, **more)


class Divided:
    """torch's optimizers with the same groups, as one."""

    def __init__(self, module):
        names = dict(module.named_parameters())
        taken = {
            "up": [p for name, p in names.items() if name.endswith("up.weight")],
            "down": [p for name, p in names.items() if name.endswith("down.bias")],
        }
        chosen = {id(p) for p in (*taken["up"], *taken["down"], names["head.weight"])}
        rest = [p for p in names.values() if id(p) not in chosen]
        adamw = torch.optim.AdamW(
            [
                {"params": rest},
                {"params": taken["up"], "lr": 0.02},
                {"params": taken["down"], "weight_decay": 0.0},
            ],
            **PARAMS,
        )
        adagrad = torch.optim.Adagrad(
            [names["head.weight"]], lr=0.005, weight_decay=0.1
        )
        self.both, self.param_groups = (
            (adamw, adagrad),
            [*adamw.param_groups, *adagrad.param_groups],
        )

    def zero_grad(self):
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.both:
            optimizer.step()


def warm_up(step, optimizer):
    """The rates of the scheduler: two steps with 0, one with half of its rate."""
    for group in optimizer.param_groups:
        group.setdefault("first", group["lr"])
        group["lr"] = group["first"] * (step > 1)


@pytest.mark.parametrize(
    "stage, ranks, more, change",
    [(1, 2, {}, None), (3, 2, {"scheduler": WARMUP}, warm_up)],
)
def test_an_engine_trains_as_torch_with_these_groups(stage, ranks, more, change):
    expected, _ = plainly(Divided, ranks=ranks, change=change)

    def main(engine, rank):
        train(engine, rank, STEPS)
        return weights(engine)

    for found in on_ranks(
        ranks, main, lambda: make(Stack), config(stage, ranks, RULES, **more)
    ):
        for name, p in expected.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rules, says",
    [
        (
            ["*.upp.weight:decay=off"],
            '"optimizer.param_groups" .*upp.* matches none of the .* parameters',
        ),
        (
            ["*.up.*:decay=off", "*.weight:lr_factor=2"],
            "matches .* and .*, and a parameter is in one group",
        ),
        (
            ["*.up.weight:optimizer=adamm"],
            "unknown optimizer 'adamm'; did you mean 'adam'",
        ),
        (
            ["embed.weight:optimizer=muon"],
            "gives embed.weight to muon, which is for 2-D weights",
        ),
        (
            ["*.up.weight:init_factor=2"],
            "an engine takes the weights of the module as they are",
        ),
        (["*.up.weight:lr_facto=2"], "the key 'lr_facto'; did you mean 'lr_factor'"),
        ("x", "is not PATTERN:KEY"),
        (
            ["*.up.weight:optimizer=onebit_adam,lr_factor=2"],
            "exchange different things",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_module_are_refused(rules, says):
    with pytest.raises(ConfigError, match=says):
        on_ranks(1, lambda engine, rank: None, lambda: make(Stack), config(0, 1, rules))
