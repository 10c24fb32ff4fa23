"""Flags of Megatron and keys of DeepSpeed without an option here: what is accepted and listed, and what is
refused."""

import json

import pytest

from megatron_ds.compat.config.deepspeed_json import (
    auto_keys,
    known_keys,
    reading_of,
    with_autos,
)
from megatron_ds.compat.config.unsupported import FLAGS, KEYS, ON_BY_DEFAULT
from megatron_ds.config import parse
from megatron_ds.config.sources.without_effect import report_without_effect
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run.startup_text import values_text

pytestmark = pytest.mark.plan

NEEDED = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 2 "
    "--lr 6e-4 --train-iters 100"
).split()
MOCK = [*NEEDED, "--vocab-size", "99", "--mock-data"]
CORPUS = [*NEEDED, "--data-path", "corpus", "--tokenizer-type", "GPT2BPETokenizer"]

# Hugging Face's standard file for ZeRO 3, and what recipes add to it.
STANDARD = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "prescale_gradients": True,
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "autotuning": {"enabled": False, "fast": True},
    "compression_training": {
        "layer_reduction": {"enabled": False, "keep_number_layer": 5}
    },
}


def accepted(config) -> set[str]:
    return set(config.without_effect)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(words, env={})
    return str(error.value)


def test_hugging_faces_standard_file_is_accepted_and_its_autos_are_the_flags(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(STANDARD))
    config = parse(
        [*MOCK, "--deepspeed_config", str(path), "--bf16", "--global-batch-size", "8"],
        env={},
    )
    assert (
        config.optimizer.lr,
        config.optimizer.bf16,
        config.train.global_batch_size,
    ) == (6e-4, True, 8)
    assert (
        config.zero.stage,
        config.logging.log_interval,
        config.zero.prescale_gradients,
    ) == (3, 2000, False)
    listed = report_without_effect(config)
    for key in (
        "pin_memory",
        "contiguous_gradients",
        "stage3_gather_16bit_weights_on_model_save",
        "prescale_gradients",
    ):
        assert key in listed, key
    for key in (
        "wall_clock_breakdown",
        "autotuning",
        "compression_training",
    ):  # false: asks for nothing
        assert key not in listed, key
    assert listed.count("\n") < 12 and "prescale" not in values_text(config)


def test_the_autos_of_a_block_can_be_named_and_filled():
    assert len(auto_keys(STANDARD)) == 16 and "optimizer.params.lr" in auto_keys(
        STANDARD
    )
    filled = with_autos(STANDARD, {"optimizer.params.lr": 3e-4, "steps_per_print": 1})
    assert (
        filled["optimizer"]["params"]["lr"] == 3e-4
        and filled["steps_per_print"] == 2000
    )
    assert (
        len(auto_keys(filled)) == 15 and STANDARD["optimizer"]["params"]["lr"] == "auto"
    )


def nested(key: str, value) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("off", [False, None, "auto", {"enabled": False, "more": 1}])
def test_a_key_that_is_off_is_accepted_unless_off_is_another_behaviour(key, off):
    reading = reading_of("ds.json", nested(key, off))
    always_on = key.rpartition(".")[2] in (
        "check_grad_overflow",
        "managed_gradient_accumulation",
        "gradient_allreduce_op",
        "num_epochs",
        "load_from_fp32_weights",
        "activation_checkpoint_interval",
    )
    if any(known.startswith(key + ".") for known in known_keys()):
        return
    if key == "checkpoint.tag_validation":  # one of three words; none of them is off
        return
    # A block of this name is on in DeepSpeed whatever it holds, and no other value is valid there.
    by_presence = key == "zero_optimization.zenflow"
    switches = off is False or isinstance(off, dict)
    is_refused = off is not None if by_presence else always_on and switches
    assert bool(reading.problems) == is_refused, reading.problems
    is_noted = key in ON_BY_DEFAULT and off is False and not is_refused
    assert bool(reading.without_effect) == is_noted


@pytest.mark.parametrize(
    "key, value",
    [
        ("gradient_allreduce_op", "sum"),
        ("progressive_layer_drop", {"enabled": True}),
        ("zero_optimization.zero_quantized_nontrainable_weights", True),
        ("managed_gradient_accumulation", False),
        ("bf16.check_grad_overflow", False),
        ("zero_optimization.load_from_fp32_weights", False),
        ("checkpoint.use_node_local_storage", True),
        ("aio.use_gds", True),
        ("compression_training", {"layer_reduction": {"enabled": True}}),
    ],
)
def test_a_key_that_would_change_numbers_or_is_missing_here_is_refused(key, value):
    problems = reading_of("ds.json", nested(key, value)).problems
    assert len(problems) == 1 and f'"{key}" is not supported: ' in problems[0]


def test_flags_that_ask_for_what_happens_anyway_are_accepted_and_listed_once():
    words = (
        "--deepspeed --deepspeed-activation-checkpointing --override-opt-param-scheduler --data-impl "
        "mmap --tensorboard-queue-size 1 --log-validation-ppl-to-tensorboard "
        "--log-batch-size-to-tensorboard "
        "--use-flash-attn "
        "--use-mcore-models --transformer-impl local --moe-grouped-gemm --exit-signal SIGTERM "
        "--no-masked-softmax-fusion --accumulate-allreduce-grads-in-fp32 --no-pipeline-parallel"
    ).split()
    config = parse([*MOCK, *words], env={})
    assert accepted(config) == {w for w in words if w in FLAGS}
    assert len(accepted(config)) == 13 and config.source(
        "optimizer.main_grads_dtype"
    ).startswith("--accumulate")
    assert report_without_effect(parse(MOCK, env={})) == ""


@pytest.mark.parametrize(
    "words, says",
    [
        ("--data-impl lazy", "megatron-ds preprocess"),
        ("--moe-latent-size 64", "width of the model"),
        ("--fp32-residual-connection", "dtype of the weights"),
        ("--exit-signal SIGHUP", "SIGTERM"),
        ("--rerun-mode report_stats", "faults of the hardware"),
        ("--accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16", "contradict"),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "contradict"),
    ],
)
def test_flags_that_ask_for_something_else_are_refused(words, says):
    assert says in refusal(*MOCK, *words.split())


def test_rope_wins_over_no_position_embedding_in_any_order():
    rope = ["--position-embedding-type", "rope"]
    for words in (
        [*rope, "--no-position-embedding"],
        ["--no-position-embedding", "--use-rotary-position-embeddings"],
    ):
        assert parse([*MOCK, *words], env={}).model.position_embedding_type == "rope"
    assert (
        parse([*MOCK, "--no-position-embedding"], env={}).model.position_embedding_type
        == "none"
    )


def test_quotes_that_a_shell_left_around_the_split_are_removed():
    assert parse([*CORPUS, "--split", "'99,1,0'"], env={}).data.splits == "99,1,0"


def test_a_divisor_of_gradients_matters_only_when_they_are_summed_in_fp16():
    config = parse([*MOCK, "--prescale-gradients"], env={})
    assert not config.zero.prescale_gradients and accepted(config) == {
        "--prescale-gradients"
    }
    config = parse(
        [*MOCK, "--prescale-gradients", "--communication-data-type", "fp16"], env={}
    )
    assert config.zero.prescale_gradients and not accepted(config)


def test_saving_options_without_a_folder_are_listed():
    words = ["--save-interval", "10", "--save-total-limit", "3", "--async-save"]
    config = parse([*MOCK, *words], env={})
    assert config.checkpoint.save_interval is None and not config.checkpoint.async_save
    listed = report_without_effect(config)
    assert "no checkpoint is written without --save DIR" in listed
    assert "--async-save" in listed


def test_the_flag_for_mock_data_replaces_the_data_of_a_recipe(tmp_path):
    config = parse(
        [
            *CORPUS,
            *"--split 9,1 --vocab-file nowhere.json --mock-data --vocab-size 99".split(),
        ],
        env={},
    )
    assert (config.data.mock_data, config.data.data_path, config.data.split) == (
        True,
        (),
        None,
    )
    assert (
        config.data.tokenizer_type == "NullTokenizer" and config.data.vocab_file is None
    )
    assert accepted(config) == {
        "--data-path corpus",
        "--split 9,1",
        "--tokenizer-type GPT2BPETokenizer",
        "--vocab-file nowhere.json",
    }
    files = ["--vocab-file", "v.json", "--merge-file", "m.txt"]
    config = parse([*NEEDED, "--mock-data", *files], env={})
    assert (
        config.data.tokenizer_type,
        config.model.vocab_size,
        config.data.vocab_file,
    ) == ("NullTokenizer", 50_256, None)
    (tmp_path / "mock.yaml").write_text("mock_data: true\n")
    assert "both choose the training data" in refusal(
        *CORPUS, "--config", str(tmp_path / "mock.yaml")
    )
