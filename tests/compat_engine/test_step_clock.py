""" "wall_clock_breakdown" of an engine: times of forward, backward and step, printed as often as progress."""

import re
import time

import pytest
import torch
from torch import nn

from megatron_ds.compat.engine import engine as engines
from megatron_ds.compat.engine import initialize

pytestmark = pytest.mark.plan

LINE = re.compile(r"time \(ms\) \| fwd: ([\d.]+) \| bwd: ([\d.]+) \| step: ([\d.]+)$")


class Slow(nn.Module):
    """Sleeps for so many milliseconds in forward, and in backward."""

    def __init__(self, forward, backward):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._times = forward, backward

    def forward(self, x):
        time.sleep(self._times[0] / 1000)
        y = self.linear(x)
        y.register_hook(lambda grad: time.sleep(self._times[1] / 1000))
        return y


def shown(monkeypatch, updates, steps=1, **keys):
    lines = []
    monkeypatch.setattr(engines, "show", lines.append)
    module = Slow(forward=30, backward=60)
    engine, *_ = initialize(
        model=module,
        model_parameters=module.parameters(),
        config={
            "train_batch_size": 2 * steps,
            "gradient_accumulation_steps": steps,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            **keys,
        },
    )
    for _ in range(updates * steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    return engine, [line for line in lines if line.startswith("time")]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_phases_have_their_times(steps, monkeypatch):
    """Means of an update: sums over its micro-batches."""
    engine, lines = shown(
        monkeypatch, 4, steps, wall_clock_breakdown=True, steps_per_print=2
    )
    assert engine.wall_clock_breakdown() and len(lines) == 2
    for line in lines:
        forward, backward, step = map(float, LINE.match(line).groups())
        assert forward >= 30 * steps and backward >= 60 * steps and step > 0


def test_without_steps_per_print_every_tenth_update_has_a_line(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    _, lines = shown(monkeypatch, 20, wall_clock_breakdown=True)
    assert len(lines) == 2


def test_nothing_is_timed_that_is_not_asked_for(monkeypatch):
    engine, lines = shown(monkeypatch, 2, wall_clock_breakdown=False, steps_per_print=1)
    assert not engine.wall_clock_breakdown() and not lines
