"""An optimizer that needs whole tensors is refused where ranks would hold parts of them."""

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.optim import OPTIMIZERS
from megatron_ds.planning.run_plan import optimizer_problems
from tools.compare_layouts import tiny_job

JOB = [*tiny_job("gpt2", "fp32", False, 0.0, 2, 4, 1), "--micro-batch-size", "1"]


@pytest.fixture
def whitening(monkeypatch):
    def whiten(groups, settings):
        raise AssertionError("it must never be built")

    whiten.needs_whole_tensors = True
    monkeypatch.setitem(OPTIMIZERS._things, "whiten", whiten)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_are_refused_to_an_optimizer_of_whole_tensors(stage, whitening):
    with pytest.raises(ConfigError, match=f"--optimizer whiten needs whole tensors, but --zero-stage {stage}"):
        parse([*JOB, "--optimizer", "whiten", "--zero-stage", str(stage)], world_size=2, rules=(optimizer_problems,))


def test_stage_0_and_elementwise_optimizers_are_not(whitening):
    whole = parse([*JOB, "--optimizer", "whiten"], world_size=2, rules=(optimizer_problems,))
    shards = parse([*JOB, "--zero-stage", "3"], world_size=2, rules=(optimizer_problems,))
    assert (whole.optimizer.optimizer, whole.zero.stage, shards.zero.stage) == ("whiten", 0, 3)
