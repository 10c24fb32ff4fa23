"""The sequence length that an engine's "curriculum_learning" passes to the module."""

import logging
import math

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh

pytestmark = pytest.mark.plan

LINEAR = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}
ROOT = {
    "schedule_type": "fixed_root",
    "schedule_config": {
        "total_curriculum_step": 6,
        "difficulty_step": 2,
        "root_degree": 2,
    },
}
STAIRS = {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8, 16], "max_step": [2, 3]},
}
CUSTOM = {
    "schedule_type": "custom",
    "schedule_config": {"function": f"{__name__}:twice"},
}
STEPS = range(1, 8)


def twice(step):
    return min(2 * step, 16)


def risen(step, degree, multiple):
    """The formula of DeepSpeed's `fixed_root`, from 4 to 16 over 6 steps."""
    length = math.floor((step / 6) ** (1 / degree) * 12 + 4)
    return min(length - length % multiple, 16)


class Cut(nn.Linear):
    """Cuts its input, and keeps the lengths that it was called with."""

    def __init__(self):
        torch.manual_seed(7)
        super().__init__(1, 1)
        self.lengths = []

    def forward(self, x, curriculum_seqlen=None):
        self.lengths.append(curriculum_seqlen)
        return super().forward(x[:, :curriculum_seqlen])


class Open(Cut):
    def forward(self, x, **rest):
        return super().forward(x, **rest)


def engine_of(module, accumulation=1, **changes):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "curriculum_learning": {**LINEAR, **changes},
    }
    engine, *_ = megatron_ds.initialize(
        model=module, config=config, mpu=Mesh(Grid.fit(1), 0)
    )
    return engine


def train(engine, updates):
    for _ in range(updates * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 16, 1)).square().mean())
        engine.step()


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ({}, [risen(step, 1, 4) for step in STEPS]),
        (ROOT, [risen(step, 2, 2) for step in STEPS]),
        (STAIRS, [4, 4, 8, 16, 16, 16, 16]),
        (CUSTOM, [2, 4, 6, 8, 10, 12, 14]),
    ],
)
@pytest.mark.parametrize("kind", [Cut, Open])
def test_a_module_is_called_with_the_length_of_the_update(kind, schedule, expected):
    module = kind()
    train(engine_of(module, **schedule), len(STEPS))
    assert module.lengths == expected


def test_micro_batches_of_one_update_have_one_length():
    module = Cut()
    train(engine_of(module, accumulation=3), 4)
    assert module.lengths == [risen(n, 1, 4) for n in range(1, 5) for _ in range(3)]


def test_evaluation_is_at_full_length():
    engine = engine_of(Cut())
    train(engine, 1)
    engine.eval()
    assert engine(torch.ones(2, 16, 1)).shape == (2, 16, 1)
    assert engine.module.lengths == [4, None]


def test_a_loaded_checkpoint_continues_with_the_lengths_and_bits_of_the_run(tmp_path):
    whole = engine_of(Cut())
    train(whole, 7)
    first = engine_of(Cut())
    train(first, 3)
    first.save_checkpoint(tmp_path)
    second = engine_of(Cut())
    second.load_checkpoint(tmp_path)
    train(second, 4)
    assert first.module.lengths + second.module.lengths == whole.module.lengths
    assert torch.equal(second.module.weight, whole.module.weight)


def test_a_module_without_the_argument_is_called_as_before_with_a_note(caplog):
    with caplog.at_level(logging.INFO):
        engine = engine_of(nn.Linear(1, 1))
    train(engine, 1)
    assert "the program cuts its sequences" in caplog.text


def test_a_length_that_is_passed_is_not_noted_as_without_effect(caplog):
    with caplog.at_level(logging.INFO):
        engine_of(Cut())
    assert "curriculum" not in caplog.text


def test_a_block_that_is_off_passes_nothing():
    module = Cut()
    train(engine_of(module, enabled=False), 1)
    assert module.lengths == [None]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"curriculum_type": "vocab"}, 'must be "seqlen"'),
        ({"min_dificulty": 4}, "unknown key"),
        ({"schedule_type": "linear"}, "Known: fixed_linear"),
        ({"min_difficulty": 32}, "above max_difficulty 16"),
        ({"schedule_config": {"difficulty_step": 4}}, "total_curriculum_step"),
    ],
)
def test_a_wrong_block_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        engine_of(Cut(), **change)
