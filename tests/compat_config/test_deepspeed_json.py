"""DeepSpeed's JSON: what each key means, its batch arithmetic, and what is refused."""

import json

import pytest

from megatron_ds.compat.config.deepspeed_json import read_deepspeed
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.data_efficiency.options import CurriculumConfig

pytestmark = pytest.mark.plan

MODEL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
    "--train-iters 100 --mock-data"
).split()


@pytest.fixture
def read(tmp_path):
    def configured(document: dict, *words: str, ranks: int = 1):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(document))
        return parse([*MODEL, "--deepspeed_config", str(path), *words], ranks)

    return configured


def problem_of(read, document: dict, *words: str, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        read(document, *words, ranks=ranks)
    return str(error.value)


def test_every_key_reaches_its_option(read):
    config = read(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 0.5,
            "steps_per_print": 7,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 1,
                "reduce_bucket_size": 5e8,
                "allgather_bucket_size": 2e8,
                "overlap_comm": False,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": 3e-4,
                    "betas": [0.8, 0.9],
                    "eps": 1e-6,
                    "weight_decay": 0.2,
                },
            },
            "tensorboard": {
                "enabled": True,
                "output_path": "logs",
                "job_name": "first",
            },
        }
    )
    assert (
        config.train.micro_batch_size,
        config.train.global_batch_size,
        config.num_microbatches,
    ) == (4, 32, 8)
    assert (
        config.optimizer.clip_grad,
        config.logging.log_interval,
        config.optimizer.params_dtype,
    ) == (0.5, 7, "bfloat16")
    zero, adam = config.zero, config.optimizer
    assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (
        1,
        5 * 10**8,
        2 * 10**8,
    )
    assert zero.overlap_comm is False
    assert (
        adam.optimizer,
        adam.lr,
        adam.adam_beta1,
        adam.adam_beta2,
        adam.adam_eps,
        adam.weight_decay,
    ) == ("adam", 3e-4, 0.8, 0.9, 1e-6, 0.2)
    assert config.logging.tensorboard_dir == "logs/first"
    assert config.source("optimizer.lr").endswith("ds.json optimizer.params.lr")


def test_fp16_block_sets_the_loss_scale(read):
    block = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
    }
    scale = read({"fp16": block}, "--lr", "1", "--micro-batch-size", "1").optimizer
    assert (scale.fp16, scale.loss_scale, scale.initial_loss_scale) == (
        True,
        None,
        4096.0,
    )
    assert (scale.loss_scale_window, scale.hysteresis, scale.min_loss_scale) == (
        500,
        3,
        2.0,
    )
    fixed = read(
        {"fp16": {**block, "loss_scale": 128}}, "--lr", "1", "--micro-batch-size", "1"
    ).optimizer
    assert fixed.loss_scale == 128.0


def test_a_block_that_is_off_changes_nothing_but_its_names_are_checked(read):
    off = {
        "fp16": {"enabled": False, "loss_scale": 128, "hysteresis": 9},
        "tensorboard": {"enabled": False},
    }
    config = read(off, "--lr", "1", "--micro-batch-size", "1")
    assert (
        config.optimizer.loss_scale,
        config.optimizer.hysteresis,
        config.logging.tensorboard_dir,
    ) == (None, 2, None)
    assert "did you mean 'hysteresis'?" in problem_of(
        read, {"fp16": {"enabled": False, "histeresis": 9}}
    )


# (given, data-parallel ranks) → (micro, global), as DeepSpeed works it out
@pytest.mark.parametrize(
    "batch, ranks, micro, total",
    [
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 16,
                "gradient_accumulation_steps": 1,
            },
            2,
            16,
            32,
        ),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 2,
            },
            2,
            8,
            32,
        ),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, 4, 32),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, 4, 32),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            2,
            4,
            24,
        ),
        ({"train_batch_size": 32}, 2, 16, 32),
        ({"train_micro_batch_size_per_gpu": 4}, 3, 4, 12),
    ],
)
def test_any_part_of_the_batch_triad_gives_the_rest(read, batch, ranks, micro, total):
    config = read(batch, "--lr", "1", ranks=ranks)
    assert (config.train.micro_batch_size, config.train.global_batch_size) == (
        micro,
        total,
    )
    assert config.train.gradient_accumulation_steps is None


@pytest.mark.parametrize("batch", [(33, 17, 2), (32, 18, 1), (32, 8, 3)])
def test_a_triad_that_does_not_work_out_is_told_with_its_numbers(read, batch):
    total, micro, steps = batch
    text = problem_of(
        read,
        {
            "train_batch_size": total,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        },
        "--lr",
        "1",
        ranks=2,
    )
    assert f"--global-batch-size {total}" in text and f"= {micro * steps * 2}" in text


def test_data_parallel_ranks_are_what_the_model_leaves_over(read):
    config = read(
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        "--lr",
        "1",
        "--tensor-model-parallel-size",
        "2",
        ranks=6,
    )
    assert config.train.global_batch_size == 24


def test_auto_takes_the_value_from_the_flags(read):
    document = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    config = read(
        document,
        "--lr",
        "3e-4",
        "--micro-batch-size",
        "3",
        "--zero-stage",
        "1",
        "--lr-warmup-iters",
        "5",
    )
    assert (config.optimizer.lr, config.train.global_batch_size, config.zero.stage) == (
        3e-4,
        3,
        1,
    )
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_decay_iters) == (
        5,
        None,
    )


def test_flags_win_over_the_json(read):
    config = read(
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
        "--lr",
        "2e-3",
        "--micro-batch-size",
        "1",
    )
    assert config.optimizer.lr == 2e-3


def test_schedulers_become_learning_rate_ramps(read):
    linear = read(
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": 1e-5,
                    "warmup_max_lr": 1e-3,
                    "warmup_num_steps": 9,
                    "warmup_type": "linear",
                },
            }
        },
        "--micro-batch-size",
        "1",
    ).optimizer
    assert (
        linear.lr_decay_style,
        linear.lr,
        linear.lr_warmup_init,
        linear.lr_warmup_iters,
        linear.lr_warmup_style,
    ) == ("WarmupLR", 1e-3, 1e-5, 9, "linear")
    default = read(
        {"scheduler": {"type": "WarmupLR"}}, "--micro-batch-size", "1", "--lr", "1"
    ).optimizer
    assert (default.lr_warmup_iters, default.lr_warmup_style) == (1000, "log")


def test_ratios_of_the_cosine_scheduler_are_parts_of_the_final_learning_rate(read):
    document = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "warmup_min_ratio": 0.1,
                "total_num_steps": 90,
                "warmup_num_steps": 10,
            },
        },
    }
    config = read(document, "--micro-batch-size", "1", "--lr", "2e-3").optimizer
    assert (
        config.lr_warmup_init,
        config.min_lr,
        config.lr_decay_iters,
    ) == pytest.approx((2e-4, 2e-7, 90))


@pytest.mark.parametrize(
    "document, says",
    [
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "are in fp32",
        ),
        (
            {"compression_training": {"layer_reduction": {"enabled": True}}},
            '"compression_training" is not supported',
        ),
        ({"zero_optimisation": {"stage": 1}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stag": 1}}, "did you mean 'stage'?"),
        ({"optimizer": {"type": "OneBitSGD"}}, "'OneBitSGD', which is not available"),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.1, 0.2]}}},
            '"optimizer.params.betas" does not apply',
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}},
                "gradient_clipping": 1,
            },
            "files do not override each other",
        ),
        (
            {"scheduler": {"type": "OneCycel"}},
            "'OneCycel', which is not available; did you mean 'OneCycle'?",
        ),
        ({"train_batch_size": 0}, "at least 1"),
        ({"gradient_clipping": "much"}, "is not a number"),
        ({"zero_optimization": {"stage": 4}}, "not one of 0, 1, 2, 3"),
        ({"fp16": {"enabled": 1}}, "not true or false"),
    ],
)
def test_a_key_without_effect_or_sense_is_refused_by_name(read, document, says):
    assert says in problem_of(read, document, "--lr", "1", "--micro-batch-size", "1")


def test_a_misspelt_block_is_one_problem_and_its_values_are_not_missing(read):
    problem = problem_of(
        read, {"optimiser": {"params": {"lr": 1e-3}}}, "--micro-batch-size", "1"
    )
    assert "did you mean 'optimizer'?" in problem and "missing" not in problem


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": true}, "fp16": {"enabled": false}}')
    with pytest.raises(ConfigError, match="'fp16' occurs twice"):
        read_deepspeed(str(path)).settings_or_error()


# ------------------------------------------------------------------ curricula
RISING = {
    "min_difficulty": 64,
    "max_difficulty": 512,
    "schedule_type": "fixed_root",
    "schedule_config": {
        "total_curriculum_step": 50,
        "difficulty_step": 16,
        "root_degree": 2,
    },
}
RARITY = {
    "index_to_sample_path": "a/s",
    "index_to_metric_path": "a/m",
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
    **RISING,
}
RUN = ("--lr", "1", "--micro-batch-size", "1")
CORPUS = ("--data-path", "a", "--tokenizer-type", "NullTokenizer", "--no-mock-data")
LENGTHS = ("--curriculum-type", "seqlen", "--curriculum-steps", "5")


def sampling(metrics, **more) -> dict:
    return {
        "data_efficiency": {
            "enabled": True,
            "seed": 7,
            "data_sampling": {
                "enabled": True,
                "num_workers": 3,
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": metrics,
                    **more,
                },
            },
        }
    }


def of_lengths(curriculum) -> tuple:
    return (
        curriculum.curriculum_type,
        curriculum.curriculum_schedule,
        curriculum.curriculum_min_length,
        curriculum.curriculum_max_length,
        curriculum.curriculum_steps,
        curriculum.curriculum_length_step,
        curriculum.curriculum_root_degree,
    )


def test_the_legacy_block_is_a_curriculum_over_lengths(read):
    curriculum = read(
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                **RISING,
            }
        },
        *RUN,
    ).of(CurriculumConfig)
    assert of_lengths(curriculum) == (
        "seqlen_truncate",
        "fixed_root",
        64,
        512,
        50,
        16,
        2.0,
    )
    from megatron_ds.extensions.data_efficiency.curricula import length_difficulty

    assert [
        length_difficulty(curriculum, 1024).at(step) for step in (1, 13, 50, 99)
    ] == [112, 288, 512, 512]
    off = read({"curriculum_learning": {"enabled": False, **RISING}}, *RUN).of(
        CurriculumConfig
    )
    assert of_lengths(off) == (None, "fixed_linear", None, None, None, 8, None)
    steps = {
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [8, 32, 64], "max_step": [5, 9]},
    }
    curriculum = read({"curriculum_learning": {"enabled": True, **steps}}, *RUN).of(
        CurriculumConfig
    )
    assert [length_difficulty(curriculum, 1024).at(step) for step in (5, 6, 9, 10)] == [
        8,
        32,
        32,
        64,
    ]


@pytest.mark.parametrize("name", ["seqlen_truncate", "seqlen_reshape"])
def test_metrics_called_like_lengths_are_lengths_and_others_choose_samples(read, name):
    length = {"difficulty_type": "value", "clustering_type": "single_cluster", **RISING}
    document = sampling(
        {"rarity": RARITY, "also": RARITY, name: length}, data_cluster_path="clusters"
    )
    config = read(document, *RUN, *CORPUS)
    assert of_lengths(config.of(CurriculumConfig)) == (
        name,
        "fixed_root",
        64,
        512,
        50,
        16,
        2.0,
    )
    assert [
        json.loads(text) for text in config.of(CurriculumConfig).curriculum_metrics
    ] == [
        {"name": "rarity", **RARITY},
        {"name": "also", **RARITY},
    ]
    assert (
        config.of(CurriculumConfig).data_efficiency_seed,
        config.data.num_workers,
    ) == (7, 3)
    assert config.of(CurriculumConfig).curriculum_cluster_path == "clusters"
    alone = read(
        sampling({"rarity": RARITY}, data_cluster_path="clusters"), *RUN, *CORPUS
    ).of(CurriculumConfig)
    assert alone.curriculum_type is None and alone.curriculum_cluster_path is None
    for block in ("enabled", "data_sampling"):
        document["data_efficiency"][block] = False if block == "enabled" else {}
        assert read(document, *RUN).of(CurriculumConfig).curriculum_metrics == ()


def test_a_curriculum_survives_run_json(read):
    from megatron_ds.config.saved_values import from_dict, to_dict

    config = read(sampling({"rarity": RARITY}), *RUN, *CORPUS)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    "document, words, said",
    [
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_type": "vocab",
                    **RISING,
                }
            },
            (),
            'must be "seqlen"',
        ),
        (
            {"curriculum_learning": {"enabled": "yes", **RISING}},
            (),
            "'yes' is not true or false",
        ),
        (
            {"curriculum_learning": {"enabled": True, **RISING, "schedule": 1}},
            (),
            'unknown key "curriculum_learning.schedule"',
        ),
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    **RISING,
                    "max_difficulty": 2048,
                }
            },
            (),
            "longer than --seq-length 1024",
        ),
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    **RISING,
                    "schedule_config": {"difficulty_step": 8},
                }
            },
            (),
            "missing: --curriculum-steps, --curriculum-root-degree",
        ),
        (
            {"curriculum_learning": {"enabled": True, **RISING, "min_difficulty": 0}},
            (),
            "it must be at least 1",
        ),
        (
            {},
            ("--curriculum-steps", "5"),
            "--curriculum-steps 5 has no effect without --curriculum-type",
        ),
        (
            {},
            (*LENGTHS, "--curriculum-min-length", "8", "--curriculum-lengths", "9"),
            "--curriculum-lengths 9 has no effect with --curriculum-schedule fixed_linear",
        ),
        ({}, LENGTHS, "--curriculum-min-length is missing; give an integer"),
        (sampling({}), (), "give a block for each metric"),
        (sampling({"a": {**RARITY, "kind": 1}}), (), "unknown key"),
        (sampling({"a": RARITY}), (), "random samples have no analysis"),
        (
            sampling({"a": {**RARITY, "difficulty_type": "rank"}}),
            (),
            "it must be value or percentile",
        ),
        (
            sampling({"a": RARITY}),
            ("--dataloader-type", "cyclic"),
            "Use --dataloader-type single",
        ),
        (
            sampling({"a": RARITY}),
            ("--no-mock-data", "--data-path", "0.5", "a", "0.5", "b"),
            "a weighted blend has no epochs",
        ),
        (
            {
                "data_efficiency": {
                    "enabled": True,
                    "data_sampling": {"dynamic_batching": {"enabled": True}},
                }
            },
            (),
            "is not supported",
        ),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"num_epochs": 3}}},
            (),
            "length of training is --train-iters",
        ),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused_with_a_reason(
    read, document, words, said
):
    assert said in problem_of(read, document, *RUN, *words)


def test_lengths_that_tensor_parallel_ranks_cannot_share_are_refused(read):
    words = (*LENGTHS, "--curriculum-min-length", "9", "--curriculum-length-step")
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    found = problem_of(read, {}, *RUN, *layout, *words, "1", ranks=2)
    assert (
        "the length 415, which is not a multiple of 2: ranks of --tensor-model-parallel-size 2"
        in found
    )
    assert (
        read({}, *RUN, *layout, *words, "2", ranks=2)
        .of(CurriculumConfig)
        .curriculum_length_step
        == 2
    )
    assert read({}, *RUN, *words, "1").of(CurriculumConfig).curriculum_length_step == 1


SPARSE = {
    "mode": "variable",
    "block": 32,
    "different_layout_per_head": True,
    "num_random_blocks": 1,
    "local_window_blocks": [2, 3],
    "global_block_indices": [0, 4],
    "global_block_end_indices": None,
    "attention": "unidirectional",
    "horizontal_global_attention": False,
}


def test_sparse_attention_reaches_the_model(read):
    batch = {"train_batch_size": 4}
    configured = lambda block: (
        read({**batch, "sparse_attention": block}, "--lr", "1e-3").model
    )
    model = configured(SPARSE)
    assert (model.sparse_attention, model.sparse_block) == (
        "variable",
        32,
    ) and model.sparse_layout_per_head
    assert (model.sparse_local_window_blocks, model.sparse_global_block_indices) == (
        (2, 3),
        (0, 4),
    )
    assert (model.sparse_num_random_blocks, model.sparse_global_block_end_indices) == (
        1,
        None,
    )
    assert configured({"block": 64}).sparse_attention == "fixed"
    assert configured({"mode": "local_sliding_window"}).sparse_attention == "local"
    assert read(batch, "--lr", "1e-3").model.sparse_attention is None


@pytest.mark.parametrize(
    "block, says",
    [
        ({"mode": "strided"}, "'strided' is not one of dense, fixed"),
        ({"block": 100}, "1000 or 1100"),
        ({"block": 100}, "--sparse-block"),
        ({"attention": "bidirectional"}, "sees no later tokens"),
        (
            {"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 3},
            "--sparse-num-global-blocks 1, 2",
        ),
        (
            {"mode": "fixed", "num_different_global_patterns": 2},
            "Add --sparse-layout-per-head",
        ),
        (
            {
                "mode": "fixed",
                "num_different_global_patterns": 5,
                "different_layout_per_head": True,
            },
            "Use 1, 2, 3",
        ),
        (
            {"mode": "fixed", "horizontal_global_attention": True},
            "later tokens to global blocks",
        ),
        ({"mode": "fixed", "num_sliding_window_blocks": 5}, "no effect"),
        (
            {
                "mode": "variable",
                "global_block_indices": [0, 4],
                "global_block_end_indices": [1],
            },
            "1 ends for",
        ),
        (
            {
                "mode": "variable",
                "global_block_indices": [4],
                "global_block_end_indices": [4],
            },
            "at or before",
        ),
        ({"mode": "bslongformer", "global_block_indices": [64]}, "0 to 63"),
        ({"num_blocks": 3}, "unknown key"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_sparse_attention_that_cannot_be_is_refused_by_name(read, block, says):
    problem = problem_of(read, {"sparse_attention": block, "train_batch_size": 4})
    assert says in problem


@pytest.mark.parametrize(
    "words, says",
    [
        ("--window-size 8,0 --sparse-attention local", "both choose the keys"),
        ("--sparse-num-local-blocks 8", "no effect without --sparse-attention fixed"),
        (
            "--model bert --sparse-attention local --sparse-direction unidirectional",
            "earlier and later ones",
        ),
    ],
)
def test_sparse_flags_that_do_not_fit_are_refused(read, words, says):
    assert says in problem_of(read, {"train_batch_size": 4}, *words.split(), ranks=2)


def test_the_validation_of_tags_is_one_of_three_words(read):
    for word in ("Ignore", "warn", "FAIL", "auto"):
        block = {"tag_validation": word, "load_universal": False}
        read({"train_batch_size": 4, "checkpoint": block}, "--lr", "1e-3")
    wrong = problem_of(read, {"checkpoint": {"tag_validation": "foo"}})
    assert (
        "\"checkpoint.tag_validation\" is 'foo'. Write Ignore, Warn or Fail." in wrong
    )
