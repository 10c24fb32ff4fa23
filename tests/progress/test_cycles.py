"""The schedulers of a JSON against golden values and DeepSpeed's own classes."""

import json
import random

import pytest

from megatron_ds.compat.config.deepspeed_json import reading_of
from megatron_ds.config import RunConfig
from megatron_ds.config.parse import parse
from megatron_ds.config.rules.training import TRAINING_RULES
from megatron_ds.config.saved_values import to_dict
from megatron_ds.config.training_schedule import make_beta1, make_learning_rate
from megatron_ds.errors import ConfigError
from megatron_ds.progress.cycles import Cycle, CycledBeta, CycleRate, RangeTest
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.from_checkpoint import with_saved_schedule
from tests.harness.deepspeed_schedulers import rates_of

pytestmark = pytest.mark.plan

BATCH = 6
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data "
    f"--micro-batch-size 2 --global-batch-size {BATCH}"
).split()
CYCLE = dict(cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=10)


def config_of(tmp_path, kind, params, *flags, optimizer=None, ranks=1) -> RunConfig:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"scheduler": {"type": kind, "params": params}, **(optimizer or {})})
    )
    has_rate = kind == "LRRangeTest" or any(
        name in params for name in ("cycle_max_lr", "warmup_max_lr")
    )
    lr = [] if has_rate else ["--lr", "2e-3"]
    flags = [*MODEL, *(flags or ("--train-iters", "80")), *([] if optimizer else lr)]
    return parse([*flags, "--deepspeed_config", str(path)], ranks, rules=TRAINING_RULES)


def progress(step: int) -> Progress:
    return Progress(step=step, scheduled_samples=BATCH * step)


# ------------------------------------------------------------------ golden values, by i = completed steps − 1
@pytest.mark.parametrize(
    "cycle, decay, expected",
    [
        (
            Cycle(1, 10, 10, decay_every=5),
            0.5,
            {
                -1: 1e-4,
                0: 1.9e-4,
                4: 5.5e-4,
                9: 1e-3,
                14: 5.5e-4,
                19: 1e-4,
                20: 9.0909091e-5,
                29: 5e-5,
                49: 2.5e-5,
            },
        ),
        (
            Cycle(1, 10, 5, 5, 2),
            0.0,
            {0: 1e-4, 1: 2.8e-4, 8: 8.2e-4, 9: 1e-3, 10: 5.5e-4, 13: 1e-4},
        ),
    ],
)
def test_one_cycle_has_deepspeeds_golden_values(cycle, decay, expected):
    rate = CycleRate(cycle, 1e-3, 1e-4, decay)
    assert {i: rate.at(i) for i in expected} == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    "in_stairs, expected",
    [
        (False, {-1: 1e-4, 0: 1.2e-4, 4: 2e-4, 9: 3e-4, 19: 5e-4}),
        (True, {0: 1e-4, 1: 1e-4, 4: 2e-4, 9: 3e-4, 10: 3e-4, 19: 5e-4}),
    ],
)
def test_the_range_test_has_deepspeeds_golden_values(in_stairs, expected):
    rate = RangeTest(1, 1e-4, 5, 1.0, in_stairs)
    assert {i: rate.at(i) for i in expected} == pytest.approx(expected)


# ------------------------------------------------------------------ DeepSpeed's classes
def random_settings(dice: random.Random) -> tuple[str, dict]:
    """(type, parameters) of a scheduler, as a JSON has them."""
    some = lambda **params: {
        name: value for name, value in params.items() if dice.random() < 0.7
    }
    kind = dice.choice(
        ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
    )
    if kind == "OneCycle":
        params = dict(
            cycle_min_lr=dice.choice([1e-4, 3e-5]),
            cycle_max_lr=dice.uniform(1e-3, 1e-1),
        ) | some(
            cycle_first_step_size=dice.randint(1, 40),
            cycle_second_step_size=dice.randint(0, 40),
            cycle_first_stair_count=dice.randint(0, 9),
            cycle_second_stair_count=dice.randint(0, 9),
            cycle_min_mom=dice.uniform(0.5, 0.8),
            cycle_max_mom=dice.uniform(0.8, 0.9),
            cycle_momentum=dice.random() < 0.7,
        )
        if dice.random() < 0.6:
            params |= dict(decay_step_size=dice.randint(1, 9)) | some(
                decay_lr_rate=dice.random()
            )
            if "decay_lr_rate" not in params or dice.random() < 0.5:
                params["decay_mom_rate"] = dice.uniform(
                    0, 0.1 * params["decay_step_size"] / 80
                )
        return kind, params
    if kind == "LRRangeTest":
        return kind, some(
            lr_range_test_min_lr=dice.uniform(1e-5, 1e-2),
            lr_range_test_step_rate=dice.random(),
            lr_range_test_step_size=dice.randint(1, 40),
            lr_range_test_staircase=True,
        )
    params = some(
        warmup_num_steps=dice.randint(1, 30), warmup_type=dice.choice(["log", "linear"])
    )
    params.setdefault("warmup_num_steps", 7)
    if kind != "WarmupLR":
        params["total_num_steps"] = dice.randint(40, 120)
    if kind == "WarmupCosineLR":
        return kind, params | some(
            warmup_min_ratio=dice.random(), cos_min_ratio=dice.random()
        )
    params |= some(warmup_min_lr=1e-5)
    return kind, params | (
        dict(warmup_max_lr=3e-3)
        if dice.random() < 0.5 or kind == "WarmupDecayLR"
        else {}
    )


def test_schedulers_equal_deepspeeds_classes_in_100_random_settings(tmp_path):
    dice, seen = random.Random(5), set()
    for _ in range(100):
        kind, params = random_settings(dice)
        config = config_of(tmp_path, kind, params, "--train-iters", "80")
        rate, beta1 = make_learning_rate(config), make_beta1(config)
        expected = rates_of(kind, 2e-3, 80, params)
        found = [rate(progress(k)) for k in range(80)]
        assert found == pytest.approx([lr for lr, _ in expected]), (kind, params)
        found = [0.9 if beta1 is None else beta1(progress(k)) for k in range(80)]
        assert found == pytest.approx([beta for _, beta in expected], rel=1e-12), (
            kind,
            params,
        )
        seen.add((kind, beta1 is not None))
    assert len(seen) == 6


def test_a_skipped_step_does_not_advance_the_cycle():
    rate = RangeTest(BATCH, 1e-4, 5)
    assert (
        rate(progress(3).after(BATCH, 1, skipped=True))
        == rate(progress(3))
        < rate(progress(4))
    )


# ------------------------------------------------------------------ configuration
def test_flags_and_json_set_the_same_cycle(tmp_path):
    params = dict(
        cycle_min_lr=1e-4,
        cycle_max_lr=1e-3,
        cycle_first_step_size=8,
        cycle_second_step_size=5,
        cycle_first_stair_count=4,
        decay_step_size=3,
        decay_lr_rate=0.5,
        cycle_min_mom=0.7,
    )
    of_json = config_of(tmp_path, "OneCycle", params)
    words = [
        word for name, value in params.items() for word in (f"--{name}", str(value))
    ]
    of_flags = parse(
        [*MODEL, "--train-iters", "80", "--lr-schedule", "OneCycle", *words], 1
    )
    assert of_flags.cycle == of_json.cycle and make_learning_rate(
        of_flags
    ) == make_learning_rate(of_json)
    cycle = Cycle(BATCH, 8, 5, 4, 4, 3)
    assert make_learning_rate(of_json) == CycleRate(cycle, 1e-3, 1e-4, 0.5)
    assert make_beta1(of_json) == CycledBeta(cycle, 0.9, 0.7)


def test_the_rate_of_the_scheduler_replaces_that_of_the_optimizer(tmp_path):
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 5e-3}}}
    for kind, params, lr in (
        ("OneCycle", CYCLE, 1e-3),
        ("LRRangeTest", {}, 1e-3),
        ("WarmupLR", {"warmup_max_lr": 7e-3, "warmup_num_steps": 5}, 7e-3),
    ):
        config = config_of(tmp_path, kind, params, optimizer=adam)
        assert config.optimizer.lr == lr
        assert "the scheduler sets the learning rate" in config.without_effect.values()


@pytest.mark.parametrize(
    "kind, params, flags, says",
    [
        (
            "OneCycle",
            {"cycle_max_lr": 1e-3},
            (),
            'needs "scheduler.params.cycle_min_lr"',
        ),
        (
            "OneCycle",
            {**CYCLE, "warmup_num_steps": 5},
            (),
            "does not apply to the scheduler OneCycle",
        ),
        (
            "OneCycle",
            {**CYCLE, "cycle_min_mom": 0.95},
            (),
            "is above --cycle-max-mom 0.9",
        ),
        ("OneCycle", {**CYCLE, "decay_mom_rate": 0.1}, (), "without --decay-step-size"),
        (
            "OneCycle",
            {**CYCLE, "decay_mom_rate": 0.01, "decay_step_size": 5},
            ("--train-iters", "300"),
            "for at most 76 steps",
        ),
        ("OneCycle", CYCLE, ("--train-samples", "600"), "counts steps"),
        (
            "OneCycle",
            CYCLE,
            ("--train-iters", "80", "--lr-warmup-iters", "3"),
            "has no effect with",
        ),
        (
            "LRRangeTest",
            {},
            ("--train-iters", "80", "--min-lr", "1e-5"),
            "begins with --lr",
        ),
        (
            "WarmupLR",
            {"warmup_num_steps": 5},
            ("--train-iters", "80", "--cycle-min-mom", "0.7"),
            "no effect without --lr-decay-style OneCycle",
        ),
        ("OnCycle", {}, (), "did you mean 'OneCycle'"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(tmp_path, kind, params, flags, says):
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, kind, params, *flags)
    assert says in str(error.value)


def test_beta1_may_grow_until_the_step_that_the_error_names(tmp_path):
    params = {**CYCLE, "decay_mom_rate": 0.01, "decay_step_size": 5}
    assert (
        make_beta1(config_of(tmp_path, "OneCycle", params, "--train-iters", "76"))(
            progress(75)
        )
        < 1
    )
    with pytest.raises(ConfigError, match="beta1 of step 77 would be 1.0"):
        config_of(tmp_path, "OneCycle", params, "--train-iters", "77")


def test_a_decay_scheduler_without_its_highest_rate_is_not_accepted_with_the_optimizers():
    """DeepSpeed would rise to 0.001."""
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 90, "warmup_num_steps": 9},
    }
    adam = lambda lr: {"type": "Adam", "params": {"lr": lr}}
    for block, rates in (
        ({}, [1e-3]),
        ({"optimizer": adam(1e-3)}, [1e-3]),
        ({"optimizer": adam("auto")}, []),
    ):
        reading = reading_of("ds.json", {"scheduler": scheduler, **block})
        assert not reading.problems
        assert [s.value for s in reading.settings if s.path == "optimizer.lr"] == rates
    problems = reading_of(
        "ds.json", {"scheduler": scheduler, "optimizer": adam(3e-5)}
    ).problems
    assert "rises to 0.001 in DeepSpeed" in problems[0]


def test_a_run_goes_on_with_the_cycle_of_its_checkpoint(tmp_path):
    saved = config_of(tmp_path, "OneCycle", CYCLE)
    now = parse(
        [
            *MODEL,
            *"--train-iters 99 --lr 1 --load x --use-checkpoint-opt_param-scheduler".split(),
        ],
        1,
    )
    found = with_saved_schedule(now, {"config": to_dict(saved)}, "x")
    assert make_learning_rate(found) == make_learning_rate(saved) and make_beta1(
        found
    ) == make_beta1(saved)
