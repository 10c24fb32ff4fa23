"""Flags and keys of recipes: done under their name, accepted with a reason, or refused."""

import json

import pytest

from megatron_ds.compat.config.deepspeed_json import reading_of
from megatron_ds.config.parse import parse
from megatron_ds.config.sources.config_text import to_yaml
from megatron_ds.config.sources.without_effect import report_without_effect
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

RUN = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 2 --lr 1e-3 --mock-data --vocab-size 61"
).split()


def parsed(words: str, ranks: int = 1):
    return parse([*RUN, *words.split()], ranks, env={})


@pytest.mark.parametrize(
    "words, path, value",
    [
        (
            "--activations-checkpoint-method uniform",
            "train.recompute_granularity",
            "full",
        ),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            "train.recompute_num_layers",
            2,
        ),
        ("--use-torch-fsdp2", "zero.stage", 3),
        ("--grad-reduce-in-bf16 --bf16", "optimizer.main_grads_dtype", "bf16"),
        (
            "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
            "zero.stage",
            3,
        ),
        ("--data-parallel-sharding-strategy optim", "zero.stage", 1),
    ],
)
def test_other_names_set_the_same_option(words, path, value):
    assert parsed(words).get(path) == value


@pytest.mark.parametrize(
    "words, activation",
    [
        ("", "gelu"),
        ("--no-bias-gelu-fusion", "gelu_exact"),
        ("--no-bias-gelu-fusion --swiglu", "swiglu"),
        ("--no-bias-gelu-fusion --openai-gelu", "gelu"),
        ("--disable-bias-linear", "gelu_exact"),
        ("--disable-bias-linear --add-qkv-bias", "gelu_exact"),
        ("--disable-bias-linear --swiglu", "swiglu"),
        ("--disable-bias-linear --activation gelu", "gelu"),
    ],
)
def test_gelu_without_megatrons_fused_kernel_is_exact(words, activation):
    config = parsed(words)
    assert config.model.activation == activation
    if activation == "gelu_exact":
        (line,) = (
            line
            for line in to_yaml(config).splitlines()
            if line.startswith("  activation:")
        )
        assert line.split("#")[1].strip() == words.split()[0]


@pytest.mark.parametrize(
    "words, layout",
    [
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            "Et|tt|tt|tttL",
        ),
        ("--decoder-last-pipeline-num-layers 2", "Ett|tt|tt|ttL"),
        (
            "--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "Et|tt|tt|tL",
        ),
    ],
)
def test_uneven_pipelines_have_the_layers_that_are_asked_for(words, layout):
    words += " --pipeline-model-parallel-size 4"
    argv = [
        word
        for word in RUN
        if "--num-layers" not in words or word not in ("--num-layers", "8")
    ]
    assert parse([*argv, *words.split()], 4, env={}).parallel.pipeline_layout == layout


FIRST, EMBEDDING = (
    "--decoder-first-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
)


@pytest.mark.parametrize(
    "words, says",
    [
        (f"{FIRST} 3", "cannot share the rest of --num-layers 8 evenly"),
        (
            f"{FIRST} 2 --num-virtual-stages-per-pipeline-rank 2",
            "which --num-virtual-stages-per-pipeline-rank 2 divides into several stages",
        ),
        (EMBEDDING, r"makes 9 layers, which 4 stages, (.|\n)*Use --num-layers 7 or 11"),
        (
            f"{EMBEDDING} --num-virtual-stages-per-pipeline-rank 2",
            "makes 9 layers, which 8 stages",
        ),
        (f"{EMBEDDING} --account-for-loss-in-pipeline-split", "makes 10 layers"),
        (f"{EMBEDDING} {FIRST} 2", "Give only one of the two"),
        (
            f"{EMBEDDING} --pipeline-layout 2,2,2,2",
            "which --pipeline-layout 2,2,2,2 states",
        ),
        (
            f"{FIRST} 2 --pipeline-layout 2,2,2,2",
            "which --pipeline-layout 2,2,2,2 states",
        ),
    ],
)
def test_an_uneven_pipeline_that_cannot_be_divided_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed(f"{words} --pipeline-model-parallel-size 4", 4)


def test_a_printed_configuration_of_an_uneven_pipeline_can_be_read_again(tmp_path):
    config = parsed(f"{FIRST} 2 --pipeline-model-parallel-size 4", 4)
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "printed.yaml")], 4, env={}) == config


def test_one_stage_has_nothing_to_divide():
    config = parsed(EMBEDDING)
    assert config.parallel.pipeline_layout is None
    assert "there is one pipeline stage" in report_without_effect(config)


def test_values_for_tensorboard_are_also_for_weights_and_biases():
    words = "--log-memory-to-tensorboard"
    assert "no --tensorboard-dir, nor a service" in report_without_effect(parsed(words))
    assert parsed(f"{words} --wandb-project p").logging.log_memory_to_tensorboard


def test_what_changes_no_number_is_listed_and_strict_flags_refuse_it():
    words = (
        "--use-persistent-ckpt-worker --tp-comm-overlap --recompute-modules core_attn mlp "
        "--dist-ckpt-strictness log_all"
    )
    listed = report_without_effect(parsed(words))
    assert all(word in listed for word in words.split() if word.startswith("--"))
    with pytest.raises(
        ConfigError,
        match=r"4 problems(.|\n)*--use-persistent-ckpt-worker changes nothing here",
    ):
        parsed(f"{words} --strict-flags")
    assert parsed("--strict-flags").model.num_layers == 8


@pytest.mark.parametrize(
    "words, says",
    [
        ("--kd", "distillation"),
        ("--use-mup", "learning rate"),
        ("--error-injection-rate 1000", "not injected"),
        ("--ds-sequence-parallel-fpdt", "divided into chunks"),
        ("--eval-global-batch-size 8", "--eval-iters sets"),
        ("--megatron-fsdp-main-params-dtype bf16", "master weights"),
    ],
)
def test_what_would_change_numbers_or_is_lost_is_refused_with_the_reason(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed(words)


def settings_of(block):
    reading = reading_of("ds.json", block)
    assert not reading.problems
    return {
        setting.path: setting.value for setting in reading.settings
    }, reading.without_effect


def test_keys_of_deepspeed_that_are_done():
    settings, _ = settings_of(
        {
            "wall_clock_breakdown": True,
            "wandb": {"enabled": True, "team": "us"},
            "optimizer": {
                "type": "Adam",
                "params": {
                    "bias_correction": False,
                    "adam_w_mode": False,
                    "max_grad_norm": 2,
                },
            },
            "zero_optimization": {"stage": 2, "cpu_offload": True},
            "aio": {"thread_count": 3},
        }
    )
    assert settings == {
        "logging.timing_log_level": 2,
        "services.wandb_project": "deepspeed",
        "services.wandb_entity": "us",
        "optimizer.optimizer": "adam",
        "optimizer.adam_bias_correction": False,
        "optimizer.decoupled_weight_decay": False,
        "optimizer.clip_grad": 2,
        "zero.stage": 2,
        "zero.offload_optimizer": "cpu",
        "zero.nvme_threads": 3,
    }


def test_values_that_ask_for_nothing_are_silent_and_others_are_listed():
    settings, listed = settings_of(
        {
            "wall_clock_breakdown": False,
            "autotuning": {"enabled": False, "fast": True},
            "wandb": {"enabled": False, "project": "x"},
            "cuda_visible_devices": 0,
            "activation_checkpointing": {"number_checkpoints": 4, "profile": False},
            "zero_optimization": {
                "contiguous_gradients": True,
                "round_robin_gradients": False,
            },
        }
    )
    assert settings == {"logging.timing_log_level": 0, "profiler.autotuning": False}
    assert [name.partition(" ")[2] for name in listed] == [
        "activation_checkpointing.number_checkpoints",
        "zero_optimization.contiguous_gradients",
    ]


def test_the_type_adamw_is_decoupled_whatever_the_mode_says():
    for kind, value in (("AdamW", None), ("Adam", False)):
        settings, listed = settings_of(
            {"optimizer": {"type": kind, "params": {"adam_w_mode": False}}}
        )
        assert settings.get("optimizer.decoupled_weight_decay") is value
        assert [name.partition(" ")[2] for name in listed] == [
            "optimizer.params.adam_w_mode"
        ] * (kind == "AdamW")


def test_a_block_inside_a_block_that_is_off_is_off():
    dynamic = {"enabled": True, "lr_scaling_method": "linear"}
    for is_on in (True, False):
        reading = reading_of(
            "ds.json",
            {
                "data_efficiency": {
                    "enabled": is_on,
                    "data_sampling": {"dynamic_batching": dynamic},
                }
            },
        )
        assert bool(reading.problems) is is_on


def test_blocks_for_a_feature_that_is_off_are_no_problem(tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 1, "sub_group_size": 1e9},
                "aio": {"queue_depth": 16},
            }
        )
    )
    config = parsed(f"--deepspeed_config {tmp_path / 'ds.json'} --bf16 --loss-scale 12")
    assert config.optimizer.loss_scale is None and config.zero.nvme_queue_depth == 32
    assert "nothing is offloaded to a disk" in report_without_effect(config)


def test_spellings_of_megatrons_help_and_of_deepspeeds_classes_are_accepted():
    kinds = parsed(
        "--num-layers 2 --context-parallel-size 2 --cp-comm-type allgather p2p", 2
    ).parallel
    assert kinds.cp_comm_type == ("all_gather", "p2p")
    assert (
        parsed("--sparse-attention local_sliding_window").model.sparse_attention
        == "local"
    )


def test_ulysses_of_megatron_deepspeed_is_a_way_of_context_parallelism():
    assert parsed("--ds-sequence-parallel-size 2", 2).parallel.cp_comm_type == ("a2a",)
    assert (
        parsed("--ds-sequence-parallel-size 2", 2).parallel.context_parallel_size == 2
    )
    assert parsed(
        "--ds-sequence-parallel-size 2 --cp-comm-type p2p", 2
    ).parallel.cp_comm_type == ("p2p",)
    assert parsed("--context-parallel-size 2", 2).parallel.cp_comm_type == ("p2p",)
    both = parsed("--ds-sequence-parallel-size 2 --force-ds-sequence-parallel", 2)
    assert (
        both.parallel.cp_comm_type == ("a2a",)
        and "--force-ds-sequence-parallel" in both.without_effect
    )
    assert "one rank holds each sequence" in report_without_effect(
        parsed("--cp-comm-type a2a")
    )
