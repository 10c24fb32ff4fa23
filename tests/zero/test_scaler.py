"""The loss scaler against a run told as prose, and against the rule written as one loop."""

import random
from types import SimpleNamespace

import pytest

from megatron_ds.errors import ConfigError
from megatron_ds.zero.loss_scale import LossScale, ScalerRule, ScalerState, make_scaler

pytestmark = pytest.mark.plan


def scales(rule, start, overflows):
    state, result = ScalerState(start, rule.hysteresis), []
    for overflow in overflows:
        state = state.after(overflow, rule)
        result.append(state.scale)
    return result


def test_the_first_overflow_is_forgiven_and_each_further_one_halves_the_scale():
    rule = ScalerRule(True, window=1000, hysteresis=2)
    assert scales(rule, 64, [1, 1, 1, 0, 1]) == [64, 32, 16, 16, 8]


def test_the_scale_doubles_after_a_window_without_overflow_and_lives_come_back_only_then():
    rule = ScalerRule(True, window=3, hysteresis=2)
    assert scales(rule, 8, [1, 0, 0, 0, 0, 1, 1]) == [8, 8, 8, 8, 16, 16, 8]
    assert scales(rule, 8, [1, 0, 0, 1]) == [8, 8, 8, 4]


def test_with_consecutive_hysteresis_one_good_step_brings_the_lives_back():
    rule = ScalerRule(True, window=1000, hysteresis=2, consecutive=True)
    assert scales(rule, 8, [1, 0, 1, 0, 1, 1]) == [8, 8, 8, 8, 8, 4]


@pytest.mark.parametrize("seed", range(30))
def test_the_rule_equals_the_published_loop(seed):
    rng = random.Random(seed)
    window, hysteresis, consecutive = (
        rng.randrange(1, 6),
        rng.randrange(1, 4),
        rng.random() < 0.5,
    )
    overflows = [rng.random() < 0.2 for _ in range(200)]
    scale, count, last, expected = 2.0**80, hysteresis, -1, []
    for i, overflow in enumerate(overflows):
        if overflow:
            if count == 1:
                scale /= 2
            else:
                count -= 1
            last = i
        else:
            if consecutive:
                count = hysteresis
            if i - last - 1 > 0 and (i - last - 1) % window == 0:
                scale *= 2
                count = hysteresis
        expected.append(scale)
    rule = ScalerRule(True, window, hysteresis, 1.0, consecutive)
    assert scales(rule, 2.0**80, overflows) == expected


def test_the_scale_stops_at_the_minimum_and_a_further_overflow_is_an_error():
    rule = ScalerRule(True, hysteresis=1, minimum=3.0)
    assert scales(rule, 8, [1, 1]) == [4, 3]
    with pytest.raises(ConfigError, match="minimum of 3"):
        scales(rule, 8, [1, 1, 1])


def test_numbers_carry_the_state_over_and_static_scales_have_none():
    rule = ScalerRule(True, window=3)
    first, second = LossScale(64.0, rule), LossScale(2.0, rule)
    for overflow in (True, True, False, False):
        first.update(overflow)
    second.load_numbers(first.numbers())
    for overflow in (False, False, False, True):
        first.update(overflow), second.update(overflow)
        assert first.state == second.state
    static = LossScale(128.0)
    static.update(True), static.load_numbers(first.numbers())
    assert static.scale == 128.0 and static.numbers() == {}


@pytest.mark.parametrize(
    "fp16, loss_scale, scale, dynamic",
    [
        (False, None, 1.0, False),
        (True, None, 2.0**12, True),
        (True, 0, 2.0**12, True),
        (True, 512.0, 512.0, False),
    ],
)
def test_the_precision_decides_which_scaler_is_made(fp16, loss_scale, scale, dynamic):
    scaler = make_scaler(
        SimpleNamespace(
            fp16=fp16,
            loss_scale=loss_scale,
            initial_loss_scale=2.0**12,
            min_loss_scale=1.0,
            loss_scale_window=10,
            hysteresis=2,
            consecutive_hysteresis=False,
        )
    )
    assert (scaler.scale, scaler.rule.dynamic) == (scale, dynamic)
