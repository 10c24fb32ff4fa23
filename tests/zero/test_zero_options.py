"""Options of ZeRO: what a DeepSpeed JSON says of them, and what is refused because it would change
nothing."""

import json

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.zero.settings import ZeroSettings

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 64 --micro-batch-size 1 --lr 1 --train-iters 1 "
    "--mock-data --tokenizer-type NullTokenizer"
).split()


def problem_of(words, world_size=4):
    with pytest.raises(ConfigError) as caught:
        parse([*JOB, *words.split()], world_size=world_size)
    return str(caught.value)


def zero_of(tmp_path, document, world_size=4):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    return parse([*JOB, "--deepspeed_config", str(path)], world_size=world_size).zero


def test_communication_keys_of_a_json_are_options(tmp_path):
    zero = zero_of(
        tmp_path, {"communication_data_type": "fp16", "gradient_predivide_factor": 4.0}
    )
    assert (zero.sent_dtype, zero.sent_divisor) == ("float16", 4.0)
    zero = zero_of(
        tmp_path, {"communication_data_type": "fp16", "prescale_gradients": True}
    )
    assert (zero.sent_dtype, zero.sent_divisor) == ("float16", None)
    # DeepSpeed's defaults
    zero = zero_of(
        tmp_path, {"gradient_predivide_factor": 1.0, "prescale_gradients": False}
    )
    assert (zero.sent_dtype, zero.sent_divisor) == (None, 1.0)


@pytest.mark.parametrize(
    "travel", ["", "--communication-data-type fp32", "--communication-data-type bf16"]
)
@pytest.mark.parametrize(
    "words", ["--gradient-predivide-factor 4", "--prescale-gradients"]
)
def test_dividing_sums_that_cannot_overflow_has_no_effect(words, travel):
    config = parse([*JOB, *words.split(), *travel.split()], world_size=4)
    assert list(config.without_effect) == [words] and config.zero.sent_divisor == 1.0


def test_dividing_sums_that_overflow_where_they_accumulate_is_refused():
    assert "--main-grads-dtype fp32" in problem_of(
        "--fp16 --main-grads-dtype fp16 --communication-data-type fp16 --prescale-gradients"
    )


def test_two_divisors_are_refused():
    assert "Give only one" in problem_of(
        "--communication-data-type fp16 --gradient-predivide-factor 4 "
        "--prescale-gradients"
    )


def test_a_hierarchy_is_an_option_of_a_json(tmp_path):
    document = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    assert zero_of(tmp_path, document).zero_hpz_partition_size == 2


def test_inner_groups_are_of_stage_3_and_equal():
    assert "--zero-stage 3" in problem_of("--zero-stage 2 --zero-hpz-partition-size 2")
    assert "1, 2 or 4" in problem_of("--zero-stage 3 --zero-hpz-partition-size 3")
    assert "--offload-param cpu" in problem_of(
        "--zero-stage 3 --zero-hpz-partition-size 2 --offload-param nvme --offload-nvme-path /"
    )


def test_blocks_are_options_of_a_json(tmp_path):
    document = {
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    }
    zero = zero_of(tmp_path, document)
    assert (
        zero.zero_quantized_weights,
        zero.zero_quantized_gradients,
        zero.zero_quantization_block,
    ) == (True, True, 256)


@pytest.mark.parametrize(
    "words, legal",
    [
        ("--zero-stage 2 --zero-quantized-weights", "--zero-stage 3"),
        ("--zero-stage 1 --zero-quantized-gradients", "--zero-stage 2"),
        ("--zero-stage 3 --zero-quantization-block 128", "--zero-quantized-weights or"),
        (
            "--zero-stage 3 --zero-quantized-gradients --zero-quantization-block 100",
            "64, 128, 256, 512, 1024, 2048",
        ),
        (
            "--zero-stage 3 --zero-quantized-weights --offload-param cpu",
            "--offload-param cpu",
        ),
        (
            "--zero-stage 3 --zero-quantized-gradients --communication-data-type bf16",
            "Remove one of the two",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused(words, legal):
    assert legal in problem_of(words)


@pytest.mark.parametrize(
    "words, means",
    [
        ("", "off"),
        ("--zero3-pin-stage", "on"),
        ("--zero3-pin-stage auto", "auto"),
        ("--zero3-pin-stage=off", "off"),
        ("--zero3-pin-stage --no-zero3-pin-stage", "off"),
        ("--zero3-pin-stage true", "on"),
    ],
)
def test_pinning_is_said_by_the_flag_alone_or_with_a_word(words, means):
    assert (
        parse(
            [*JOB, "--zero-stage", "3", *words.split()], world_size=4
        ).zero.zero3_pin_stage
        == means
    )


@pytest.mark.parametrize(
    "written, means",
    [("true", "on"), ("on", "on"), ("no", "off"), ("auto", "auto"), ('"on"', "on")],
)
def test_pinning_in_a_file_is_a_word_or_yes_or_no(written, means, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"zero3_pin_stage: {written}\n")
    assert (
        parse(
            [*JOB, "--zero-stage", "3", "--config", str(path)], world_size=4
        ).zero.zero3_pin_stage
        == means
    )


def test_pinning_by_another_word_is_refused():
    problem = problem_of("--zero-stage 3 --zero3-pin-stage always")
    assert "'always'" in problem and "off, on, auto" in problem


@pytest.mark.parametrize("factor", ["0", "-2", "nan"])
def test_a_divisor_is_positive(factor):
    assert "--gradient-predivide-factor" in problem_of(
        f"--communication-data-type fp16 --gradient-predivide-factor {factor}"
    )


@pytest.mark.parametrize(
    "parameters, ranks, elements",
    [
        (4_000_000, 8, 1_000_000),
        (80_000_000, 8, 10_000_000),
        (7_000_000_000, 8, 40_000_000),
        (7_000_000_000, 256, 256_000_000),
        (80_000_000, 256, 10_000_000),
    ],
)
def test_the_largest_bucket_grows_with_the_ranks_that_send_pieces_of_it(
    parameters, ranks, elements
):
    settings = ZeroSettings.from_config(parse(JOB))
    assert settings.elements_of_bucket(parameters, ranks) == elements
