"""What becomes of DeepSpeed's keys in a training script and in an engine: one reading for both."""

import json
import logging

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.config.deepspeed_spellings import loads, without_extras
from megatron_ds.compat.config.targets import reading_for
from megatron_ds.compat.engine.json_settings import read_settings
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.zero.loss_scale import make_scaler

pytestmark = pytest.mark.plan

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}
# Blocks of DeepSpeed's documentation that inform, or that belong to the program's model and loop.
INFORMING = {
    "dump_state": True,
    "memory_breakdown": True,
    "monitor_config": {"enabled": True},
    "autotuning": {
        "enabled": True,
        "metric": "throughput",
        "start_profile_step": 3,
        "end_profile_step": 5,
    },
    "activation_checkpointing": {"profile": True},
    "checkpoint": {
        "tag_validation": "Warn",
        "load_universal": True,
    },
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4],
    },
    "curriculum_learning": CURRICULUM,
    "pipeline": {
        "stages": "auto",
        "partition": "best",
        "activation_checkpoint_interval": 0,
    },
    "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4},
    "disable_python_gc": True,
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
    "vocabulary_size": 1001,
    "graph_harvesting": True,
    "use_data_before_expert_parallelism": True,
}
# Keys of "zero_optimization" that choose an implementation, each with a value that is not DeepSpeed's default.
IMPLEMENTATION = {
    "compute_grad_norm": False,
    "memory_efficient_linear": False,
    "override_module_apply": False,
    "allgather_sequential": True,
    "parameter_alignment": True,
    "pipeline_loading_checkpoint": True,
    "enable_sanity_checks": True,
    "grad_hooks": True,
    "log_trace_cache_warnings": True,
    "mics_hierarchical_params_gather": True,
}
NOT_IN_SCRIPTS = (
    "autotuning",
    "curriculum_learning",
    "elasticity",
    "pipeline",
    "sparse_attention",
)


def make():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def engine_of(block, model=None):
    engine, *_ = megatron_ds.initialize(
        model=model or make(), config={**BASE, **block}, mpu=Mesh(Grid.fit(1), 0)
    )
    return engine


@pytest.mark.parametrize("key", INFORMING)
def test_a_block_that_only_informs_is_accepted_by_an_engine_and_noted(key, caplog):
    reading = reading_for({**BASE, key: INFORMING[key]}, "engine", "ds.json")
    assert not reading.problems
    assert any(f"ds.json {key}" in note for note in reading.without_effect)
    with caplog.at_level(logging.INFO):
        engine = engine_of({key: INFORMING[key]})
    assert f"config {key}" in caplog.text
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("key", [key for key in INFORMING if key not in NOT_IN_SCRIPTS])
def test_a_block_that_only_informs_is_accepted_by_a_training_script(key):
    assert not reading_for({**BASE, key: INFORMING[key]}, "train").problems


def test_a_comet_block_becomes_flags_but_for_its_key():
    block = {"enabled": True, "workspace": "w", "experiment_name": "n", "online": False}
    reading = reading_for({**BASE, "comet": block | {"mode": "create"}}, "train", "c")
    found = {setting.path: setting.value for setting in reading.settings}
    names = ("project", "workspace", "experiment_name", "offline_dir")
    assert [found[f"services.comet_{name}"] for name in names] == [
        "general",
        "w",
        "n",
        ".cometml-runs",
    ]
    assert "c comet.mode" in reading.without_effect and not reading.problems
    off = reading_for({**BASE, "comet": block | {"enabled": False}}, "train")
    assert not any("comet" in setting.path for setting in off.settings)
    with_key = reading_for({**BASE, "comet": block | {"api_key": "k"}}, "train")
    assert "Set COMET_API_KEY" in str(with_key.problems)


@pytest.mark.parametrize(
    "block, words",
    [
        ({"sequence_parallel_size": 4}, "give a module that is split"),
        (
            {"compression_training": {"weight_quantization": {}, "on": True}},
            "planned for a later version",
        ),
        ({"nebula": {"enabled": True}}, "by no service"),
        ({"hybrid_engine": {"enabled": True}}, "the code that trains it"),
        (
            {"zero_optimization": {"stage": 3, "aio": {"queue_depth": 8}}},
            "there is no 'aio' in \"zero_optimization\"; it belongs at the top level",
        ),
        (
            {"bf16": {"loss_scale_window": 100}},
            'there is no \'loss_scale_window\' in "bf16"; it belongs in "fp16"',
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "Use bfloat16, or an fp16 block",
        ),
        (
            {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
            "are both enabled",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtpe": "bfloat16"}},
            'unknown key "torch_autocast.dtpe"',
        ),
        (
            {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4},
            "makes each engine.step()",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_advice(block, words):
    with pytest.raises(
        ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")
    ):
        engine_of(block)


def test_an_engine_raises_the_problems_of_the_reading():
    block = {
        **BASE,
        "sequence_parallel_size": 4,
        "zero_optimization": {"stage": 1, "frob": 1},
    }
    with pytest.raises(ConfigError) as caught:
        engine_of(block)
    problems = reading_for(block, "engine").problems
    assert len(problems) == 3 and all(
        problem in str(caught.value) for problem in problems
    )
    assert len(reading_for(block, "train").problems) == 1


# ------------------------------------------------------------------ spellings
def settings_of(block, target="engine"):
    reading = reading_for({**BASE, **block}, target)
    assert not reading.problems
    return {
        setting.path: setting.value for setting in reading.settings
    }, reading.without_effect


def test_names_without_a_prefix_and_former_names_mean_the_usual_ones():
    found, _ = settings_of(
        {
            "bfloat16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "param_persistence_threshold": 77,
                "prefetch_bucket_size": 99,
                "max_live_parameters": 1e9,
                "max_reuse_distance": 1e9,
                "gather_16bit_weights_on_model_save": True,
                "cpu_offload_param": True,
            },
        }
    )
    assert found["optimizer.bf16"] is True
    assert (
        found["zero.param_persistence_threshold"] == 77
        and found["zero.prefetch_bucket_size"] == 99
    )
    assert found["zero.offload_param"] == "cpu"
    assert "fp16.opt_level" in str(
        settings_of({"fp16": {"enabled": True, "opt_level": "O2"}})[1]
    )


def test_offloaded_parameters_at_stage_2_are_ignored_with_a_note_as_in_deepspeed():
    block = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    for target in ("train", "engine"):
        found, notes = settings_of(block, target)
        assert "zero.offload_param" not in found
        assert notes["config zero_optimization.offload_param"].startswith(
            "it applies to stage 3"
        )
    at_3 = {"zero_optimization": {**block["zero_optimization"], "stage": 3}}
    assert settings_of(at_3)[0]["zero.offload_param"] == "cpu"


def test_accelerates_template_with_auto_for_saved_weights_and_a_sub_group_size_is_accepted():
    engine = engine_of(
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 1e9,
                "stage3_gather_16bit_weights_on_model_save": "auto",
                "mics_shard_size": 8,
                "grad_hooks": True,
            }
        }
    )
    assert engine.settings.zero.stage == 3


@pytest.mark.parametrize("key", IMPLEMENTATION)
@pytest.mark.parametrize("target", ["train", "engine"])
def test_a_choice_of_an_implementation_is_accepted_and_noted(key, target):
    """Also false, where it is not the default."""
    block = {"zero_optimization": {"stage": 3, key: IMPLEMENTATION[key]}}
    _, notes = settings_of(block, target)
    assert any(note.endswith(key) for note in notes)


def test_what_is_the_default_is_not_noted():
    on = {key: True for key, value in IMPLEMENTATION.items() if value is False}
    off = {key: False for key, value in IMPLEMENTATION.items() if value is True}
    block = {"zero_optimization": {**on, **off}, "dump_state": False, "log_level": None}
    assert not settings_of(block)[1]


def test_mics_is_hierarchical_partitioning_at_stage_3():
    size = "zero.zero_hpz_partition_size"
    mics = "config zero_optimization.mics_shard_size"
    found, notes = settings_of(
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    )
    assert found[size] == 2 and not notes
    off, _ = settings_of({"zero_optimization": {"stage": 3, "mics_shard_size": -1}})
    assert size not in off
    below, notes = settings_of(
        {"zero_optimization": {"stage": 2, "mics_shard_size": 2}}
    )
    assert size not in below and "stage 3" in notes[mics]
    both = {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 4}
    found, notes = settings_of({"zero_optimization": both})
    assert found[size] == 4 and "is given" in notes[mics]


def test_small_groups_and_offloading_to_nothing_are_accepted():
    groups, notes = settings_of({"zero_optimization": {"sub_group_size": 0}})
    assert groups["zero.sub_group_size"] == 2048
    assert "2048 elements" in notes["config zero_optimization.sub_group_size"]
    nothing = {"stage": 3, "offload_optimizer": None, "offload_param": None}
    found, _ = settings_of({"zero_optimization": nothing})
    assert "zero.offload_optimizer" not in found


def test_the_newer_of_two_names_for_offloading_is_taken(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    found, notes = settings_of(
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": True,
                "offload_optimizer": disk,
            }
        }
    )
    assert (
        found["zero.offload_optimizer"] == "nvme"
        and "config zero_optimization.cpu_offload" in notes
    )


def test_on_one_rank_what_only_saves_traffic_is_noted():
    zero_plus_plus = {
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    engine = engine_of({"zero_optimization": {"stage": 3, **zero_plus_plus}})
    assert "one rank sends nothing" in engine.settings.without_effect.values()
    assert not engine.settings.zero.zero_quantized_weights


# ------------------------------------------------------------------ comments
TEXT = """{
  // settings for the small cluster, "quoted"
  "train_micro_batch_size_per_gpu": 2,   # here, too
  /* two
     lines, */
  "name": "a // b # c, }",
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3,}},
}"""


def test_comments_and_trailing_commas_are_read_as_by_deepspeed(tmp_path):
    expected = {**BASE, "name": "a // b # c, }"}
    assert loads(TEXT) == expected and without_extras(TEXT).count("\n") == TEXT.count(
        "\n"
    )
    path = tmp_path / "ds.json"
    path.write_text(TEXT.replace('  "name": "a // b # c, }",\n', ""))
    assert engine_of({}).settings.train == engine_with(path).settings.train
    path.write_text(TEXT.replace("1e-3", "one"))
    with pytest.raises(ConfigError, match=r"ds\.json:2: this is not JSON"):
        engine_with(path)
    assert loads(json.dumps(expected)) == expected


def engine_with(path):
    engine, *_ = megatron_ds.initialize(
        model=make(), config=str(path), mpu=Mesh(Grid.fit(1), 0)
    )
    return engine


# ------------------------------------------------------------------ behaviour
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_autocast_trains_as_torch_alone(stage):
    engine = engine_of(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage},
        }
    )
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        out = engine(x)
        assert out.dtype is torch.bfloat16 and not torch.is_autocast_enabled("cpu")
        engine.backward(out.float().square().sum())
        engine.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(x)
        loss.float().square().sum().backward()
        optimizer.step()
    with engine.gathered_parameters():
        for found, expected in zip(engine.module.parameters(), plain.parameters()):
            assert found.dtype is torch.float32
            torch.testing.assert_close(
                found, expected, rtol=1e-6, atol=1e-7
            )  # another AdamW's rounding


def test_autocast_is_left_when_a_forward_fails():
    engine = engine_of({"torch_autocast": {"enabled": True}})
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu")


def test_unmanaged_accumulation_makes_each_step_an_update():
    engine = engine_of({"managed_gradient_accumulation": False})
    for _ in range(2):
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert engine.global_steps == 2


def test_consecutive_hysteresis_refills_after_a_step_without_overflow():
    scales = {}
    for consecutive in (False, True):
        fp16 = {
            "enabled": True,
            "hysteresis": 2,
            "initial_scale_power": 4,
            "consecutive_hysteresis": consecutive,
        }
        scaler = make_scaler(engine_of({"fp16": fp16}).settings.optimizer)
        for overflow in (True, False, True):
            scaler.update(overflow)
        scales[consecutive] = scaler.scale
    assert scales == {False: 8.0, True: 16.0}


def test_the_level_of_the_log_is_that_of_the_json():
    log = logging.getLogger("megatron_ds")
    before = log.level
    try:
        for key, level in (("ERROR", logging.ERROR), ("debug", logging.DEBUG)):
            assert engine_of({"log_level": key}).log_level() == key
            assert log.level == level
        assert engine_of({}).log_level() is None
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)
    with pytest.raises(ConfigError, match="\"log_level\" is 'loud'"):
        engine_of({"log_level": "loud"})


def test_a_block_that_deepspeed_turns_on_by_its_presence_is_refused_empty_too():
    with pytest.raises(ConfigError, match="even an empty block turns it on"):
        engine_of({"zero_optimization": {"stage": 2, "zenflow": {}}})
    engine_of({"zero_optimization": {"stage": 2, "zenflow": None}})


def test_the_folder_of_offloaded_state_is_made_where_it_is_missing(tmp_path):
    folder = tmp_path / "scratch" / "run"
    offload = {"device": "nvme", "nvme_path": str(folder)}
    engine = engine_of(
        {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    )
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    assert engine.global_steps == 1
    assert folder.is_dir()


# ------------------------------------------------------------------ keys that DeepSpeed ignores
def zero_of(stage, **zero):
    """(settings, notes) of an engine's JSON with a block of ZeRO."""
    block = {**BASE, "zero_optimization": {"stage": stage, **zero}}
    settings = read_settings(block, data_parallel_size=2)
    return settings.zero, str(dict(settings.without_effect))


@pytest.mark.parametrize("target", ["train", "engine"])
def test_a_path_as_a_name_is_no_key(target):
    """TRL's trainers write such keys for the copy that they only evaluate."""
    block = {
        **BASE,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 77},
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
        "zero_optimization.reduce_bucket_size": "auto",
        "scheduler.params.total_num_steps": "auto",
    }
    reading = reading_for(block, target, "ds.json")
    found = {setting.path: setting.value for setting in reading.settings}
    assert not reading.problems and found["zero.prefetch_bucket_size"] == 77
    notes = [
        name for name, why in reading.without_effect.items() if "no such key" in why
    ]
    assert notes == [f"ds.json {key}" for key in block if "." in key]
    if target == "engine":
        assert read_settings(block, 1).zero.prefetch_bucket_size == 77


def test_a_path_inside_a_block_is_refused_as_deepspeed_does():
    block = {**BASE, "zero_optimization": {"offload_param.device": "cpu", "stage": 3}}
    [problem] = reading_for(block, "engine").problems
    assert 'unknown key "offload_param.device" in "zero_optimization"' in problem


@pytest.mark.parametrize(
    "key, value, option",
    [
        ("stage3_param_persistence_threshold", 1e6, "param_persistence_threshold"),
        ("stage3_prefetch_bucket_size", 5e8, "prefetch_bucket_size"),
        ("zero_hpz_partition_size", 2, "zero_hpz_partition_size"),
    ],
)
def test_keys_of_stage_3_have_no_effect_at_other_stages(key, value, option):
    default = getattr(zero_of(2)[0], option)
    for stage in (0, 2):
        zero, notes = zero_of(stage, **{key: value})
        assert getattr(zero, option) == default
        assert f"{key}" in notes and f"this is stage {stage}" in notes
    zero, notes = zero_of(3, **{key: value})
    assert getattr(zero, option) == value and "this is stage" not in notes


@pytest.mark.parametrize(
    "zero",
    [
        {"sub_group_size": 1e9},
        {"sub_group_size": 1e9, "offload_param": {"device": "cpu"}},
        {"offload_optimizer": {"device": "none", "ratio": 0.5}},
    ],
)
def test_keys_of_offloaded_state_have_no_effect_without_it(zero):
    found, notes = zero_of(3, **zero)
    assert (found.sub_group_size, found.offload_optimizer_ratio) == (4 * 2**20, 1.0)
    assert "the optimizer's state is not offloaded" in notes


NOTES = {
    "_comment": "written by hand",
    "comment": "the same",
    "_read_the_docs": "https://example.org",
    "//": "a line",
    "logging": {"steps": 10},
    "log": {"enabled": True},
    "memory_optimization": {"enabled": True},
    "comms_config": {"verbose": False},
}


@pytest.mark.parametrize("target", ["train", "engine"])
def test_keys_at_the_top_that_only_carry_notes_are_left_out(target):
    reading = reading_for({**BASE, **NOTES}, target, "ds.json")
    assert not reading.problems
    assert [f"ds.json {key}" for key in NOTES] == [
        name for name, why in reading.without_effect.items() if "no such key" in why
    ]


@pytest.mark.parametrize(
    "block, word",
    [
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"lr": 1e-4}, "did you mean 'optimizer.params.lr'"),
        ({"stage": 3}, "zero_optimization.stage"),
        ({"cpu_offload": True}, 'it belongs in "zero_optimization"'),
        ({"zero_optimization": {"notes": 1}}, 'unknown key "zero_optimization.notes"'),
        ({"fp8": {"enabled": True}}, '"fp8" is not supported'),
        ({"weight_quantization": {"a": 1}}, '"weight_quantization" is not supported'),
    ],
)
def test_a_key_that_asks_for_something_is_refused(block, word):
    [problem] = reading_for({**BASE, **block}, "engine").problems
    assert word in problem


def test_a_setting_of_another_program_in_the_fp16_block_has_no_effect():
    block = {"enabled": True, "fp16_scale_tolerance": 0.25}
    found, notes = settings_of({"fp16": block})
    assert found["optimizer.fp16"] is True and "fairseq" in str(notes)


@pytest.mark.parametrize(
    "beside, params, is_taken",
    [
        ({"eps": 1e-8}, {}, True),
        ({"eps": 1e-6}, {"eps": 1e-6}, True),
        ({"betas": [0.9, 0.95]}, {"betas": [0.9, 0.95]}, True),
        ({"eps": 1e-6}, {}, False),
        ({"eps": 1e-8}, {"eps": 1e-6}, False),
        ({"lr": 1e-3}, {}, False),
    ],
)
def test_a_parameter_beside_params_is_left_out_if_it_changes_nothing(
    beside, params, is_taken
):
    """DeepSpeed ignores all of them, so another value would be lost."""
    params = {"lr": 1e-3, **params}
    optimizer = {"type": "AdamW", "params": params, **beside}
    reading = reading_for({**BASE, "optimizer": optimizer}, "engine", "ds.json")
    assert bool(reading.problems) != is_taken
    [key] = beside
    noted = reading.without_effect.get(f"ds.json optimizer.{key}", "")
    assert ("the value is the same" in noted) == is_taken
