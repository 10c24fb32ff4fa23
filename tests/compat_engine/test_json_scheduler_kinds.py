"""The JSON's scheduler is an instance of DeepSpeed's class of its type, and of no other one."""

import pytest

from megatron_ds.compat.deepspeed import schedules as schedules
from tests.harness.engine_runs import Stack, config_of, make, on_ranks

pytestmark = pytest.mark.threads

PARAMS = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
}


@pytest.mark.parametrize("kind", PARAMS)
def test_its_type_is_its_class(kind):
    config = config_of(0, 1, scheduler={"type": kind, "params": PARAMS[kind]})
    [scheduler] = on_ranks(
        1, lambda engine, _: engine.lr_scheduler, lambda: make(Stack), config
    )
    classes = schedules.VALID_LR_SCHEDULES
    assert [
        name for name in classes if isinstance(scheduler, getattr(schedules, name))
    ] == [kind]


@pytest.mark.parametrize("lr,warnings", [(0.001, 0), (0.02, 1)])
def test_a_decay_without_a_highest_rate_rises_to_deepspeeds_default(
    lr, warnings, caplog
):
    params = {"warmup_num_steps": 2, "total_num_steps": 9, "warmup_type": "linear"}
    config = config_of(0, 1, scheduler={"type": "WarmupDecayLR", "params": params})
    config["optimizer"]["params"]["lr"] = lr

    def main(engine, rank):
        engine.lr_scheduler.step(2)
        return engine.lr_scheduler.get_lr(), type(engine.lr_scheduler).__name__

    assert on_ranks(1, main, lambda: make(Stack), config) == [
        ([0.001], "JsonScheduler")
    ]
    assert caplog.text.count("rises to 0.001, DeepSpeed's default") == warnings
