"""DeepSpeed's JSON without flags: what an engine makes of it, and what it says of mistakes."""

import json

import pytest

from megatron_ds.compat.engine.json_settings import in_words_of_json, read_settings
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

GOOD = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def problem_of(config, ranks=2):
    with pytest.raises(ConfigError) as error:
        read_settings(config, ranks)
    return str(error.value)


def test_a_dict_and_a_file_mean_the_same(tmp_path):
    config = {
        **GOOD,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for source in (config, path, str(path)):
        settings = read_settings(source, 2)
        assert (settings.train.micro_batch_size, settings.num_microbatches) == (4, 3)
        assert (settings.zero.stage, settings.optimizer.params_dtype) == (2, "bfloat16")


@pytest.mark.parametrize(
    "given, ranks, micro, steps",
    [
        ({"train_batch_size": 32}, 2, 16, 1),
        ({"train_micro_batch_size_per_gpu": 5}, 3, 5, 1),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2, 4, 4),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            2,
            4,
            3,
        ),
    ],
)
def test_the_batch_is_worked_out_as_by_deepspeed(given, ranks, micro, steps):
    settings = read_settings({**given, "optimizer": GOOD["optimizer"]}, ranks)
    assert (settings.train.micro_batch_size, settings.num_microbatches) == (
        micro,
        steps,
    )
    assert settings.train.global_batch_size == micro * steps * ranks


def test_where_the_json_is_silent_deepspeeds_defaults_hold():
    o = read_settings(GOOD, 1).optimizer
    assert (o.weight_decay, o.clip_grad, o.lr_decay_style, o.initial_loss_scale) == (
        0.0,
        1.0,
        "constant",
        65536.0,
    )
    assert (o.adam_beta1, o.adam_beta2, o.adam_eps, o.gradient_dtype) == (
        0.9,
        0.999,
        1e-8,
        "float32",
    )


@pytest.mark.parametrize(
    "change, says",
    [
        ({"zero_optimisation": {"stage": 1}}, "did you mean 'zero_optimization"),
        ({"zero_optimization": {"stag": 1}}, "did you mean 'stage'?"),
        (
            {"sequence_parallel_size": 2},
            "config sequence_parallel_size is refused here",
        ),
        (
            {"gradient_clipping": "auto"},
            '"gradient_clipping" is "auto", and no value for it was given as '
            "args.max_grad_norm",
        ),
        (
            {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 8},
            '"train_batch_size" 32 or 48',
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "Give only one"),
        (
            {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
            'has no effect without "zero_optimization.stage" 3',
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "nvme"},
                }
            },
            "needs a folder",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            '"scheduler.params.warmup_num_steps" 1000',
        ),
        ({"optimizer": {"type": "Muon"}}, "missing: the learning rate"),
        (
            {
                "prescale_gradients": True,
                "fp16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp16"},
            },
            '"communication_data_type" fp16',
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            '"zero_optimization.zero_hpz_partition_size" 1 or 2',
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            '"data_types.grad_accum_dtype" fp32',
        ),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_json(change, says):
    text = problem_of({**GOOD, **change})
    assert says in text and "--" not in text


def test_all_mistakes_are_told_at_once_and_nonsense_too():
    text = problem_of(
        {"zero": 1, "scheduler": {"type": "OnCycle"}, "optimizer": {"type": "Sophia"}}
    )
    assert all(word in text for word in ("3 problems", '"zero"', "OnCycle", "Sophia"))
    text = problem_of({})
    assert (
        "missing: the size of a batch" in text
        and "missing: the learning rate" not in text
    )  # no optimizer
    assert "give a dict" in problem_of(3) and "no-such.json" in problem_of(
        "no-such.json"
    )


def test_words_that_are_no_flags_of_the_json_stay():
    assert (
        in_words_of_json("--zero-stage 3, --save x")
        == '"zero_optimization.stage" 3, --save x'
    )


@pytest.mark.parametrize(
    "kind, rate", [("Adam", 1e-3), ("AdamW", 1e-3), ("Lion", 1e-3), ("Adagrad", 1e-2)]
)
def test_an_optimizer_without_a_learning_rate_has_deepspeeds(kind, rate):
    assert read_settings({**GOOD, "optimizer": {"type": kind}}, 2).optimizer.lr == rate
    given = {"type": kind, "params": {"lr": 0.5}}
    assert read_settings({**GOOD, "optimizer": given}, 2).optimizer.lr == 0.5
