"""Kept tokens and layer-tokens of random-LTD: DeepSpeed's integers; and what its JSON and the flags may
say."""

import json
import random

import pytest

from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_batch_size
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.data_efficiency.difficulty import Rise
from megatron_ds.extensions.data_efficiency.options import RandomLTDConfig
from megatron_ds.extensions.dry_run.dry_run import flops_text
from megatron_ds.extensions.dry_run.kept_tokens import savings
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.progress.kept_tokens import KeptTokens
from megatron_ds.progress.ramps import Progress

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 128 --vocab-size 99 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 9 --mock-data"
).split()
LTD = "--random-ltd --random-ltd-min-tokens 32 --random-ltd-steps 100".split()
DEEPSPEED = {
    "total_layer_num": 6,
    "random_ltd_layer_num": 3,
    "random_ltd_layer_id": [1, 2, 4],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "seq_batch_dim",
    "enabled": True,
    "layer_token_lr_schedule": {"enabled": False},
    "random_ltd_schedule": {
        "min_value": 32,
        "max_value": 128,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 100, "seq_per_step": 16},
    },
}

# (min, max, require_steps, seq_per_step) → get_value at these steps, and the total of layer-tokens of 40
# steps of 3 sequences through 5 blocks, 2 of which drop: from deepspeed 0.19.8's RandomLTDScheduler.
STEPS_ASKED = (0, 1, 7, 13, 39)
GOLDEN = {
    (16, 128, 20, 16): ((16, 16, 48, 80, 128), 68832),
    (100, 100, 7, 16): ((100, 100, 100, 100, 100), 60000),
    (10, 100, 13, 7): ((7, 14, 56, 98, 100), 56010),
    (32, 2048, 200000, 16): ((32, 32, 32, 32, 32), 744960),
    (1, 33, 3, 1): ((1, 11, 33, 33, 33), 19410),
}


class Upstream:
    """The schedule as DeepSpeed keeps it: a state that each step moves, before its forward."""

    def __init__(self, least, most, steps, multiple, blocks, dropping, batch):
        self.least, self.most, self.steps, self.multiple = least, most, steps, multiple
        self.blocks, self.dropping, self.batch = blocks, dropping, batch
        self.current, self.consumed = least, 0

    def update(self, step):
        if self.current < self.most:
            value = int((step / self.steps) * (self.most - self.least) + self.least)
            self.current = min(value - value % self.multiple, self.most)
        self.consumed += self.batch * (
            self.current * self.dropping + self.most * (self.blocks - self.dropping)
        )
        return self.current


@pytest.mark.parametrize("schedule", GOLDEN)
def test_kept_tokens_and_layer_tokens_are_those_of_deepspeed(schedule):
    drop = KeptTokens((1, 3), 5, Rise(*schedule, lowest=0))
    values, total = GOLDEN[schedule]
    assert tuple(drop.kept_at(step) for step in STEPS_ASKED) == values
    assert 3 * sum(drop.layer_tokens(step, schedule[1]) for step in range(40)) == total


def test_on_random_schedules_they_follow_the_state_that_upstream_keeps():
    draw = random.Random(1)
    for _ in range(1000):
        least, steps, multiple = (
            draw.randint(1, 300),
            draw.randint(1, 60),
            draw.randint(1, 64),
        )
        most, blocks, batch = (
            least + draw.choice((0, 1, draw.randint(0, 2000))),
            draw.randint(2, 40),
            draw.randint(1, 64),
        )
        dropping = draw.randint(1, blocks)
        drop = KeptTokens(
            tuple(range(dropping)), blocks, Rise(least, most, steps, multiple, lowest=0)
        )
        upstream, consumed = (
            Upstream(least, most, steps, multiple, blocks, dropping, batch),
            0,
        )
        for step in range(steps + draw.randint(0, 80)):
            assert drop.kept_at(step) == upstream.update(step)
            consumed += batch * drop.layer_tokens(step, most)
            assert consumed == upstream.consumed


def test_of_a_shorter_sequence_at_most_all_tokens_are_kept_and_counted():
    drop = KeptTokens((1, 2), 4, Rise(16, 64, 10, 16))
    assert (
        drop.kept_at(9, length=40) == 40 and drop.layer_tokens(9, length=40) == 4 * 40
    )
    assert drop.layer_tokens(0, length=40) == 2 * 16 + 2 * 40


def test_blocks_are_all_but_the_first_and_the_last_unless_they_are_named():
    assert parse([*JOB, *LTD]).kept_tokens.blocks == (1, 2, 3, 4)
    assert parse(
        [*JOB, *LTD, "--random-ltd-layer-ids", "5", "0"]
    ).kept_tokens.blocks == (0, 5)
    assert parse(JOB).kept_tokens is None


def test_what_a_run_saves_is_counted_step_by_step_as_its_batch_grows():
    ramp = "--train-samples 100 --rampup-batch-size 2 2 24 --random-ltd-layer-ids 1 2 3".split()
    at = JOB.index("--train-iters")
    config = parse([*JOB[:at], *JOB[at + 2 :], *LTD[:-1], "8", *ramp])
    drop, batch_size, samples, tokens, step = (
        config.kept_tokens,
        make_batch_size(config),
        0,
        0,
        0,
    )
    while samples + batch_size.at(samples) <= 100:
        size = batch_size.at(samples)
        samples, tokens, step = (
            samples + size,
            tokens + size * (3 * drop.kept_at(step, 128) + 3 * 128),
            step + 1,
        )
    saving = savings(config, drop)
    assert (saving.first, saving.last) == (32, 128) and step > 12
    assert saving.layer_tokens == tokens and saving.token_share == tokens / (
        samples * 6 * 128
    )
    assert saving.token_share < 1 and saving.flop_share < 1
    [told] = [
        line
        for line in flops_text(plan_world(config, 0, "cpu"))
        if "over the run" in line
    ]
    assert f"{tokens:,} tokens" in told


def test_progress_counts_layer_tokens():
    assert (
        Progress()
        .after(2, 8, layer_tokens=30)
        .after(2, 8, layer_tokens=32)
        .layer_tokens
        == 62
    )


def from_json(tmp_path, ltd: dict, **around) -> list[str]:
    block = {
        "data_efficiency": {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": ltd} | around,
        }
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(block))
    return [*JOB, "--deepspeed_config", str(path)]


def test_a_json_of_deepspeed_means_what_the_flags_mean(tmp_path):
    flags = [*LTD, *"--random-ltd-layer-ids 1 2 4 --random-ltd-max-tokens 128".split()]
    drop = parse(from_json(tmp_path, DEEPSPEED)).kept_tokens
    assert drop == parse([*JOB, *flags]).kept_tokens and drop.blocks == (1, 2, 4)
    assert [drop.kept_at(step) for step in (0, 50, 99, 100)] == [32, 80, 112, 128]


@pytest.mark.parametrize(
    "around, ltd",
    [({"enabled": False}, DEEPSPEED), ({}, DEEPSPEED | {"enabled": False}), ({}, {})],
)
def test_of_a_block_that_is_off_nothing_counts(tmp_path, around, ltd):
    assert parse(from_json(tmp_path, ltd, **around)).kept_tokens is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"random_ltd_layer_num": 4}, '"random_ltd_layer_id" contains 3 layers'),
        ({"total_layer_num": 24}, "--num-layers 6"),
        (
            {"layer_token_lr_schedule": {"enabled": True}},
            "the learning rate follows samples or steps",
        ),
        ({"random_ltd_layer_ids": [1]}, "did you mean"),
        ({"random_ltd_layer_id": [1, 2, 6]}, "no block 6 among 6"),
        (
            {
                "random_ltd_schedule": DEEPSPEED["random_ltd_schedule"]
                | {"schedule_type": "fixed_root"}
            },
            "fixed_linear",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_told(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        parse(from_json(tmp_path, DEEPSPEED | change))


SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--random-ltd"], "needs --random-ltd-min-tokens"),
        (["--random-ltd-steps", "5"], "no effect without --random-ltd"),
        ([*LTD, "--random-ltd-max-tokens", "129"], "more than --seq-length 128"),
        ([*LTD, "--random-ltd-max-tokens", "16"], "the number only grows"),
        (
            [*LTD, "--random-ltd-tokens-per-step", "33"],
            "no token would be kept at first",
        ),
        ([*LTD, "--random-ltd-layer-ids", "2", "2"], "contains 2 twice"),
        (
            [*LTD, "--num-layers", "2"],
            "no block remains besides the first and the last",
        ),
        (
            [*LTD, *SP, "--random-ltd-tokens-per-step", "15"],
            "Use --random-ltd-tokens-per-step 14 or 16",
        ),
        (
            [*LTD, *SP, "--random-ltd-max-tokens", "65"],
            "Use --random-ltd-max-tokens 64 or 66",
        ),
    ],
)
def test_flags_that_cannot_be_are_told_with_what_could(flags, words):
    with pytest.raises(ConfigError, match=words):
        parse([*JOB, *flags], world_size=2)


def test_kept_tokens_need_not_be_shared_without_sequence_parallelism_nor_where_they_never_change():
    for flags in (SP[:2], [*SP, "--random-ltd-max-tokens", "32"]):
        config = parse(
            [*JOB, *LTD, *flags, "--random-ltd-tokens-per-step", "15"], world_size=2
        )
        assert config.of(RandomLTDConfig).random_ltd_tokens_per_step == 15
