"""DeepSpeed's schedulers as classes: the rates of DeepSpeed 0.19.8 at every step, which is installed for
tests."""

import pytest
import torch

from megatron_ds.compat.deepspeed import schedules as ours
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
CASES = [
    ("WarmupLR", {"warmup_max_lr": 0.02, "warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    (
        "WarmupLR",
        {
            "warmup_min_lr": [0.0, 0.001],
            "warmup_max_lr": [0.1, 0.2],
            "warmup_num_steps": 4,
        },
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 11, "warmup_num_steps": 3, "warmup_max_lr": 0.3},
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 11, "warmup_num_steps": 3, "warmup_min_ratio": 0.0},
    ),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 3,
            "decay_lr_rate": 0.1,
            "decay_step_size": 2,
        },
    ),
]
# One number for each group; the numbers of a group alone are DeepSpeed's input.
LISTS = {
    "cycle_min_lr": [0.01, 0.02],
    "cycle_max_lr": [0.1, 0.2],
    "cycle_first_step_size": 4,
    "cycle_min_mom": [0.7, 0.75],
    "cycle_max_mom": [0.9, 0.95],
}


def rates(module, name: str, arguments: dict) -> list:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.05, 0.07)
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler, found = getattr(module, name)(optimizer, **arguments), []
    for _ in range(14):
        found.append(
            [(group["lr"], group["betas"][0]) for group in optimizer.param_groups]
        )
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name,arguments", CASES)
def test_the_rates_of_all_groups_are_those_of_deepspeed(name, arguments):
    for mine, other in zip(
        rates(ours, name, arguments), rates(theirs, name, arguments)
    ):
        assert [pytest.approx(pair, rel=1e-9, abs=1e-15) for pair in other] == mine


def test_each_group_has_momenta_of_its_own():
    for group in range(2):
        alone = {
            name: numbers[group] if isinstance(numbers, list) else numbers
            for name, numbers in LISTS.items()
        }
        expected = [step[group] for step in rates(theirs, "OneCycle", alone)]
        assert [step[group] for step in rates(ours, "OneCycle", LISTS)] == [
            pytest.approx(pair, rel=1e-9) for pair in expected
        ]


def test_a_schedule_goes_on_from_its_state():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    first = ours.WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=9)
    for _ in range(4):
        first.step()
    other = ours.WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=9)
    other.load_state_dict(first.state_dict())
    assert other.get_lr() == first.get_lr() and other.get_lr() != [0.0]


def test_wrong_numbers_are_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="2 values for 1 parameter groups"):
        ours.WarmupLR(optimizer, warmup_max_lr=[0.1, 0.2])
    with pytest.raises(ConfigError, match="warmup_num_steps=0"):
        ours.WarmupLR(optimizer, warmup_num_steps=0)
