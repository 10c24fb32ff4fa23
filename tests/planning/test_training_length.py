"""Lengths and learning rates in tokens, against a plain loop that takes one step after the other."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_learning_rate, make_weight_decay
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.data_efficiency.options import (
    CurriculumConfig,
    RandomLTDConfig,
)
from megatron_ds.planning.training_length import make_length, planned_steps
from megatron_ds.progress.ramps import Progress, TokenCount
from megatron_ds.training.samples import wanted_samples

pytestmark = pytest.mark.plan

MODEL = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 6 --seq-length 32 --vocab-size 99 "
    "--micro-batch-size 1 --lr 0.1 --mock-data"
)
LENGTHS = "--curriculum-type {} --curriculum-min-length 8 --curriculum-steps 7 --curriculum-length-step 4"
LTD = "--random-ltd --random-ltd-min-tokens 8 --random-ltd-steps 9 --random-ltd-tokens-per-step 4"
RAMP = "--rampup-batch-size 1 1 20"
CURRICULA = [
    "",
    LENGTHS.format("seqlen_truncate"),
    LENGTHS.format("seqlen_reshape"),
    LTD,
    f"{LENGTHS.format('seqlen_truncate')} {LTD}",
]


def config_of(words: str):
    return parse([*MODEL.split(), *words.split()], env={})


def plain_progress(config):
    """Progress before each step of an endless run, counted the plain way from the flags."""
    curriculum, routing, now = (
        config.of(CurriculumConfig),
        config.of(RandomLTDConfig),
        Progress(),
    )
    for step in itertools.count():
        yield now
        size = config.train.global_batch_size
        if config.train.rampup_batch_size:
            size = min(size, 1 + now.samples * (size - 1) // 20)
        length, rows, kept = 32, 1, 32
        if curriculum.curriculum_type:
            length = min(32, math.floor((step + 1) / 7 * (32 - 8) + 8) // 4 * 4)
            rows = 32 // length if curriculum.curriculum_type == "seqlen_reshape" else 1
        if routing.random_ltd:
            kept = min(length, math.floor(step / 9 * (32 - 8) + 8) // 4 * 4)
        layer_tokens = 2 * length + 2 * min(
            kept, length
        )  # four layers, of which two drop tokens
        now = now.after(
            size, size * rows * length, layer_tokens=size * rows * layer_tokens
        )


def seen(config, progress: Progress) -> int:
    """Tokens as Megatron-DeepSpeed counts them: of the layers' mean."""
    return progress.layer_tokens // 4 if config.kept_tokens else progress.tokens


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CURRICULA),
    st.sampled_from(["", RAMP]),
    st.integers(1, 5),
    st.integers(1, 4000),
    st.sampled_from(["", "--train-samples 40"]),
    st.integers(0, 30),
)
def test_a_length_in_tokens_ends_with_the_step_that_reaches_it(
    curriculum, ramp, size, tokens, bound, done
):
    config = config_of(
        f"--global-batch-size {size} --train-tokens {tokens} {curriculum} {ramp} {bound}"
    )
    length, taken, at = make_length(config), 0, []
    for progress in plain_progress(config):
        at.append(progress)
        over = (
            bound
            and progress.samples
            + (size if not ramp else min(size, 1 + progress.samples * (size - 1) // 20))
            > 40
        )
        if seen(config, progress) >= tokens or over:
            break
        assert not length.is_reached(progress)
        taken += 1
    assert length.is_reached(at[-1])
    assert planned_steps(config) == taken and length.samples_after() == at[-1].samples
    done = min(done, taken)  # a run that is resumed there
    assert length.steps_after(at[done]) == taken - done


def test_the_steps_of_trillions_of_tokens_are_counted_at_once():
    config = config_of(
        f"--global-batch-size 2 --train-tokens 15e12 {LENGTHS.format('seqlen_truncate')}"
    )
    lost = sum(2 * (32 - 8 - math.floor(t / 7 * 24) // 4 * 4) for t in range(1, 8))
    assert planned_steps(config) == math.ceil((15 * 10**12 + lost) / 64)


def plain_rate(tokens: int, warmup: int, decay: int, lowest: float) -> float:
    """Megatron-DeepSpeed's scheduler with spans in tokens, cosine."""
    if warmup and tokens <= warmup:
        return 0.1 * tokens / warmup
    if tokens > decay:
        return lowest
    return (
        lowest
        + (0.1 - lowest)
        * (math.cos(math.pi * (tokens - warmup) / (decay - warmup)) + 1)
        / 2
    )


@pytest.mark.parametrize("curriculum", CURRICULA)
@pytest.mark.parametrize(
    "length",
    [
        "--train-tokens 4000",
        "--train-tokens 4000 --train-samples 9999 --lr-decay-tokens 3000",
        "--train-iters 60 --lr-decay-tokens 3000",
    ],
)
def test_the_learning_rate_follows_the_tokens_that_were_consumed(curriculum, length):
    config = config_of(
        "--global-batch-size 3 --lr-warmup-tokens 500 --min-lr 0.01 --lr-decay-style cosine "
        f"{length} {curriculum}"
    )
    ramp, decay = make_learning_rate(config), 3000 if "decay" in length else 4000
    for progress in itertools.islice(plain_progress(config), 60):
        assert ramp(progress) == pytest.approx(
            plain_rate(seen(config, progress), 500, decay, 0.01), rel=1e-12
        )


def test_a_warm_up_fraction_and_the_weight_decay_are_in_tokens_too():
    config = config_of(
        "--train-tokens 4000 --lr-warmup-fraction 0.25 --start-weight-decay 0 "
        "--end-weight-decay 1 --weight-decay-incr-style linear"
    )
    assert make_learning_rate(config)(Progress(tokens=500)) == pytest.approx(0.05)
    assert make_weight_decay(config)(Progress(tokens=1000)) == 0.25


def test_tokens_of_skipped_steps_count():
    assert TokenCount()(Progress().after(2, 64, skipped=True)) == 64


@pytest.mark.parametrize(
    "length, samples",
    [
        ("--train-tokens 1000", 33),  # 32 tokens a sample, three samples a step
        # a bound decides the order of samples, as in Megatron-DeepSpeed
        ("--train-tokens 1000 --train-samples 200", 200),
        ("--train-tokens 1000 --train-iters 50", 150),
    ],
)
def test_a_length_in_tokens_needs_so_many_samples(length, samples):
    assert (
        wanted_samples(config_of(f"--global-batch-size 3 --eval-iters 0 {length}"))[0]
        == samples
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "--train-iters 9 --train-samples 9 --train-tokens 9",
            "both set the length of training",
        ),
        (
            "--train-tokens 900 --lr-decay-tokens 90 --lr-warmup-iters 3",
            "Use --lr-warmup-tokens 96",
        ),
        (
            "--train-tokens 900 --lr-warmup-tokens 9 --lr-warmup-fraction 0.1",
            "both set the warm-up",
        ),
        ("--train-tokens 900 --lr-decay-iters 9", "Use --lr-decay-samples 9"),
    ],
)
def test_units_that_do_not_fit_are_refused_with_the_number_in_the_other_unit(
    words, said
):
    with pytest.raises(ConfigError) as error:
        config_of(words)
    assert said in str(error.value)
