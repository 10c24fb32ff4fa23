"""Ramps against Megatron's and DeepSpeed's values."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config import OptimizerConfig, RunConfig, TrainConfig
from megatron_ds.config.training_schedule import (
    make_batch_size,
    make_learning_rate,
    make_weight_decay,
    parse_batch_steps,
)
from megatron_ds.progress.ramps import (
    BatchSize,
    DeepSpeedRate,
    LearningRate,
    Progress,
    WeightDecay,
    count_steps,
)

pytestmark = pytest.mark.plan

# warm-up 100, decay 1000, from 3e-4 to 3e-5, as Megatron's scheduler gives them
MEGATRON = [
    ("linear", 400, 2.1e-4),
    ("linear", 550, 1.65e-4),
    ("linear", 50, 1.5e-4),
    ("linear", 100, 3e-4),
    ("linear", 1001, 3e-5),
    ("cosine", 101, 2.999992e-4),
    ("cosine", 400, 2.325e-4),
    ("cosine", 800, 6.1584e-5),
    ("cosine", 950, 3.205095e-5),
    ("inverse-square-root", 101, 2.985112e-4),
    ("inverse-square-root", 400, 1.5e-4),
    ("inverse-square-root", 1000, 9.486833e-5),
    ("inverse-square-root", 1001, 3e-5),
    ("constant", 5000, 3e-4),
]
WSD = [
    ("linear", 900, 1.65e-4),
    ("cosine", 900, 1.65e-4),
    ("exponential", 900, 1.418377e-4),
    ("minus_sqrt", 900, 1.090812e-4),
    ("linear", 950, 9.75e-5),
    ("cosine", 950, 6.954058e-5),
    ("exponential", 950, 8.108592e-5),
    ("minus_sqrt", 950, 6.617314e-5),
    ("linear", 800, 3e-4),
    ("linear", 300, 3e-4),
]


@pytest.mark.parametrize("style, n, expected", MEGATRON)
def test_learning_rate_has_megatrons_values(style, n, expected):
    ramp = LearningRate(highest=3e-4, lowest=3e-5, warmup=100, decay=1000, style=style)
    assert ramp.at(n) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("style, n, expected", WSD)
def test_wsd_has_megatrons_values(style, n, expected):
    ramp = LearningRate(
        highest=3e-4,
        lowest=3e-5,
        warmup=100,
        decay=1000,
        style="WSD",
        final=200,
        final_style=style,
    )
    assert ramp.at(n) == pytest.approx(expected, rel=1e-6)


def test_warmup_starts_at_its_initial_value():
    assert LearningRate(highest=3e-4, initial=1e-5, warmup=100, decay=1000).at(
        50
    ) == pytest.approx(1.55e-4)


def test_a_skipped_step_does_not_advance_the_learning_rate_but_does_advance_the_batch_ramp():
    rate = LearningRate(highest=1.0, warmup=10, decay=100)
    batch = BatchSize.growing(4, 4, 12, 16)
    after = Progress().after(8, 8, skipped=True)
    assert rate(after) == 0.0
    assert batch(after) == 8


@pytest.mark.parametrize(
    "n, expected",
    [(0, 0.01), (250, 0.02318), (500, 0.055), (750, 0.08682), (1000, 0.1), (1001, 0.1)],
)
def test_weight_decay_rises_along_megatrons_cosine(n, expected):
    assert WeightDecay(0.01, 0.1, 1000, "cosine").at(n) == pytest.approx(
        expected, rel=1e-4
    )


def test_weight_decay_rises_linearly():
    assert WeightDecay(0.0, 0.1, 1000, "linear").at(250) == pytest.approx(0.025)


@pytest.mark.parametrize(
    "ramp, values",
    [
        (
            (16, 8, 300_000, 1024),
            {
                0: 16,
                2380: 16,
                2381: 24,
                4762: 32,
                150_000: 520,
                299_999: 1016,
                300_000: 1024,
                10**9: 1024,
            },
        ),
        (
            (32, 32, 1_953_125, 1152),
            {55_803: 32, 55_804: 64, 976_562: 576, 1_953_125: 1152},
        ),
    ],
)
def test_batch_size_has_megatrons_values(ramp, values):
    start, increment, span, final = ramp
    batch = BatchSize.growing(start, increment, final, span)
    assert {n: batch.at(n) for n in values} == values


def test_a_batch_ramp_that_starts_at_its_end_is_flat():
    assert [BatchSize.growing(8, 4, 8, 100).at(n) for n in (0, 50, 100)] == [8, 8, 8]


@given(
    start=st.integers(1, 5),
    increment=st.integers(1, 4),
    increments=st.integers(0, 6),
    span=st.integers(0, 90),
    samples=st.integers(0, 400),
)
def test_counted_steps_are_the_steps_that_a_loop_makes(
    start, increment, increments, span, samples
):
    batch = BatchSize.growing(start, increment, start + increment * increments, span)
    n = steps = 0
    while n + batch.at(n) <= samples:
        n, steps = n + batch.at(n), steps + 1
    assert count_steps(batch, samples) == steps
    assert count_steps(BatchSize.constant(start), samples) == samples // start


# --- DeepSpeed: i = steps done − 1, warm-up of N steps, T in all; values worked out by hand from its formulas
def test_warmup_lr_rises_with_the_logarithm_of_the_step():
    ramp = DeepSpeedRate("WarmupLR", highest=1e-3, batch=4, initial=1e-5, warmup=100)
    assert ramp(Progress()) == 1e-5
    assert ramp(Progress(scheduled_samples=4)) == 1e-5  # i = 0, ln 1 = 0
    assert ramp(Progress(scheduled_samples=4 * 10)) == pytest.approx(
        1e-5 + 99e-5 * 0.5
    )  # ln 10 / ln 100
    assert ramp(Progress(scheduled_samples=4 * 101)) == 1e-3


def test_warmup_decay_lr_falls_in_a_line_to_where_it_started():
    ramp = DeepSpeedRate(
        "WarmupDecayLR",
        highest=1.0,
        batch=1,
        initial=0.1,
        warmup=10,
        total=110,
        warmup_style="linear",
    )
    assert [ramp.at(i) for i in (-1, 0, 5, 10, 60, 110, 200)] == pytest.approx(
        [0.1, 0.1, 0.55, 1.0, 0.55, 0.1, 0.1]
    )


def test_warmup_cosine_lr_starts_at_zero_and_stays_on_its_floor():
    ramp = DeepSpeedRate(
        "WarmupCosineLR",
        highest=2.0,
        batch=1,
        lowest=0.2,
        initial=0.4,
        warmup=10,
        total=110,
        warmup_style="linear",
    )
    assert [ramp.at(i) for i in (-1, 0, 5, 59, 109, 500)] == pytest.approx(
        [0.0, 0.4, 1.2, 1.1, 0.2, 0.2]
    )


def test_deepspeeds_warmup_is_at_least_two_steps():
    assert DeepSpeedRate("WarmupLR", highest=1.0, batch=1, warmup=0).at(
        1
    ) == pytest.approx(1.0)
    assert (
        DeepSpeedRate(
            "WarmupLR", highest=1.0, batch=1, warmup=0, warmup_style="linear"
        ).at(1)
        == 0.5
    )


# --- from the configuration
def config(optimizer: dict, train: dict) -> RunConfig:
    return RunConfig(
        optimizer=OptimizerConfig(lr=3e-4, **optimizer),
        train=TrainConfig(micro_batch_size=1, **train),
    )


def test_iterations_are_counted_in_global_batches():
    by_iterations = make_learning_rate(
        config(
            dict(min_lr=3e-5, lr_warmup_iters=10, lr_decay_style="cosine"),
            dict(train_iters=100, global_batch_size=10),
        )
    )
    by_samples = make_learning_rate(
        config(
            dict(min_lr=3e-5, lr_warmup_samples=100, lr_decay_style="cosine"),
            dict(train_samples=1000, global_batch_size=10),
        )
    )
    for n in (0, 50, 100, 101, 400, 1000, 1001):
        assert by_iterations.at(n) == by_samples.at(n)
    assert by_iterations.at(400) == pytest.approx(2.325e-4)


def test_warmup_fraction_is_a_part_of_the_decay_span():
    ramp = make_learning_rate(
        config(
            dict(lr_warmup_fraction=0.25, lr_decay_iters=40),
            dict(train_iters=99, global_batch_size=5),
        )
    )
    assert (ramp.warmup, ramp.decay) == (50, 200)


def test_deepspeed_scheduler_counts_steps_whatever_the_batch():
    settings = dict(
        lr_decay_style="WarmupLR", lr_warmup_iters=4, lr_warmup_style="linear"
    )
    ramp = make_learning_rate(
        config(settings, dict(train_iters=99, global_batch_size=6))
    )
    assert [
        ramp(Progress(scheduled_samples=6 * step)) for step in range(6)
    ] == pytest.approx([0, 0, 0.75e-4, 1.5e-4, 2.25e-4, 3e-4])


def test_weight_decay_spans_the_whole_training():
    ramp = make_weight_decay(
        config(
            dict(
                start_weight_decay=0.0,
                end_weight_decay=0.2,
                weight_decay_incr_style="linear",
            ),
            dict(train_iters=10, global_batch_size=3),
        )
    )
    assert ramp(Progress(scheduled_samples=15)) == pytest.approx(0.1)
    assert (
        make_weight_decay(
            config(dict(weight_decay=0.3), dict(train_iters=1, global_batch_size=3))
        )(Progress())
        == 0.3
    )


def test_batch_size_is_constant_without_a_ramp():
    assert (
        make_batch_size(SimpleNamespace(train=TrainConfig(global_batch_size=7)))(
            Progress(samples=99)
        )
        == 7
    )
    ramp = make_batch_size(
        SimpleNamespace(
            train=TrainConfig(global_batch_size=8, rampup_batch_size=(2, 3, 12))
        )
    )
    assert [ramp.at(n) for n in (0, 5, 6, 11, 12)] == [2, 2, 5, 5, 8]


def config_of(ranks=1, seq_length=2048, **train):
    return SimpleNamespace(
        train=TrainConfig(**{"micro_batch_size": 1, **train}),
        model=SimpleNamespace(seq_length=seq_length),
        data_parallel_size=ranks,
    )


def test_step_schedule_has_megatrons_values():
    """Thresholds in tokens become samples by whole division; a size holds from its threshold on."""
    words = "0:768 250B:1536 500B:3072 750B:6144"
    ramp = make_batch_size(
        config_of(step_batch_size_schedule=(words,), global_batch_size=6144)
    )
    second, third, fourth = (n * 10**9 // 2048 for n in (250, 500, 750))
    for n, size in (
        (0, 768),
        (second - 1, 768),
        (second, 1536),
        (third - 1, 1536),
        (third, 3072),
        (fourth, 6144),
    ):
        assert ramp.at(n) == size
    assert (ramp.smallest, ramp.final) == (768, 6144)


@pytest.mark.parametrize(
    "words, steps",
    [
        (("0:4", "1.5K:8"), ((0, 4), (150, 8))),
        (("0:4,200:8",), ((0, 4), (20, 8))),
        (("3m:2k", "0:1"), ((0, 1), (300_000, 2000))),
    ],
)
def test_step_schedule_reads_what_megatron_reads(words, steps):
    assert parse_batch_steps(words, 10) == steps


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "TOKENS:SIZE"),
        ("0:4 8", "TOKENS:SIZE"),
        ("20:4", "first size must begin at 0"),
        ("0:4 100:8 109:16", "two sizes"),
        ("0:x", "'x'"),
        ("0:4 1.55:8", "'1.55'"),
        ("0:-4", "'-4'"),
    ],
)
def test_step_schedule_says_what_is_wrong_with_it(text, words):
    with pytest.raises(ValueError, match=words):
        parse_batch_steps((text,), 10)


@pytest.mark.parametrize(
    "ranks, sizes", [(1, [30, 50]), (4, [28, 48]), (7, [28, 49]), (16, [16, 48])]
)
def test_a_batch_is_rounded_down_to_what_all_ranks_take_at_once(ranks, sizes):
    """Megatron: the largest multiple of micro-batch times data-parallel size."""
    ramp = make_batch_size(
        config_of(
            ranks,
            1,
            step_batch_size_schedule=("0:30", "90:50"),
            global_batch_size=50,
            decrease_batch_size_if_needed=True,
        )
    )
    assert [ramp.at(0), ramp.at(90)] == sizes == [ramp.smallest, ramp.final]


batch_ramps = st.one_of(
    st.builds(BatchSize.constant, st.integers(1, 9)),
    st.builds(
        lambda start, by, times, span: BatchSize.growing(
            start, by, start + by * times, span
        ),
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(0, 6),
        st.integers(0, 90),
    ),
    st.builds(
        lambda first, rest: BatchSize(((0, first), *sorted(rest.items()))),
        st.integers(1, 9),
        st.dictionaries(st.integers(1, 80), st.integers(1, 9), max_size=4),
    ),
)
batch_ramps |= st.builds(
    lambda ramp: ramp.rounded_down(min(ramp.smallest, ramp.final)), batch_ramps
)


@given(batch_ramps, st.integers(0, 200), st.integers(0, 200))
def test_steps_are_counted_as_one_takes_them_one_by_one(ramp, samples, consumed):
    steps, n = 0, consumed
    while n + ramp.at(n) <= samples:
        steps, n = steps + 1, n + ramp.at(n)
    assert count_steps(ramp, samples, consumed) == steps


@given(batch_ramps, st.integers(0, 100))
def test_a_batch_size_holds_until_it_says(ramp, n):
    until = ramp.until(n)
    assert until > n and {
        ramp.at(i) for i in range(n, min(int(min(until, 10**6)), n + 100))
    } == {ramp.at(n)}


def test_counting_the_steps_of_trillions_of_tokens_takes_no_time():
    ramp = BatchSize(((0, 768), (122_070_312, 1536)))
    assert (
        count_steps(ramp, 10**9)
        == -(-122_070_312 // 768) + (10**9 - -(-122_070_312 // 768) * 768) // 1536
    )
