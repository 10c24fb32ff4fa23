"""`megatron-ds launch --autotuning`: the trials, their folder and the best JSON; what an engine measures."""

import json
import math
import sys

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.launch.autotuning import (
    Trial,
    TunedProgram,
    autotune,
    fits,
    program_of,
    state_bytes,
)
from megatron_ds.extensions.launch.command import main
from megatron_ds.extensions.launch.trial_order import (
    features,
    fitted,
    model_choice,
    predicted,
)
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh

pytestmark = pytest.mark.plan

# Samples per second of a program: by stage and micro-batch; of others the trial fails.
SPEED = {(0, 2): 100, (0, 4): 150, (0, 8): 152, (1, 2): 90, (1, 4): 170, (1, 8): 200}
PROGRAM = """
import json, sys
config = json.load(open(sys.argv[2]))
open("ran.txt", "a").write(" ".join(sys.argv[3:]) + "\\n")
if "autotuning" in config:
    place = (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"])
    speed = SPEED.get(place)
    if speed is None:
        sys.exit("out of memory")
    numbers = {"throughput": speed, "latency": 1000 * place[1] / speed, "FLOPS_per_gpu": speed}
    json.dump(numbers, open(config["autotuning"]["metric_path"], "w"))
else:
    sys.exit(7)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function from a JSON to a program that is started without a launcher."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(PROGRAM.replace("SPEED", repr(SPEED)))
    whole = TunedProgram.command
    started = lambda *args: [sys.executable, *whole(*args)[3:]]
    monkeypatch.setattr(TunedProgram, "command", started)

    def made(stage=0, **block):
        settings = {"min_train_micro_batch_size_per_gpu": 2, **block}
        config = {
            "train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "autotuning": {"enabled": True, **settings},
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        return program_of([], ["fake.py", "--deepspeed_config", "ds.json"])

    return made


def results(tmp_path):
    found = tmp_path / "autotuning_results"
    best = json.loads((found / "ds_config_optimal.json").read_text())
    return {path.name for path in found.iterdir() if path.is_dir()}, best


def test_sizes_double_until_the_metric_is_flat_and_the_best_json_is_written(
    program, tmp_path
):
    assert autotune(program(), "tune", lambda line: None) == 0
    trials, best = results(tmp_path)
    # 8 is less than 5 % better than 4, so 16 is not tried.
    assert trials == {f"z0_gas2_tmbspg{n}" for n in (2, 4, 8)}
    assert best["train_micro_batch_size_per_gpu"] == 8
    assert best["zero_optimization"] == {"stage": 0, "overlap_comm": True}
    assert "autotuning" not in best and "train_batch_size" not in best
    settings = json.loads(
        (tmp_path / "autotuning_exps/z0_gas2_tmbspg4.json").read_text()
    )
    assert settings["autotuning"]["metric_path"].endswith(
        "z0_gas2_tmbspg4/metrics.json"
    )
    text = (tmp_path / "autotuning_results/summary.txt").read_text()
    assert "| z0_gas2_tmbspg4 | 150 |" in text
    command = (tmp_path / "autotuning_results/cmd_optimal.txt").read_text()
    assert "fake.py --deepspeed_config" in command
    assert "ds_config_optimal.json" in command


def test_all_stages_are_tried_and_a_failure_ends_a_stage(program, tmp_path):
    lines = []
    autotune(program(stage=[0, 1, 2]), "tune", lines.append)
    trials, best = results(tmp_path)
    assert {name for name in trials if name[1] != "0"} == {
        *(f"z1_gas2_tmbspg{n}" for n in (2, 4, 8, 16)),
        "z2_gas2_tmbspg2",
    }
    assert best["zero_optimization"]["stage"] == 1
    failed = "| z2_gas2_tmbspg2 | failed |"
    assert failed in (tmp_path / "autotuning_results/summary.txt").read_text()


def test_run_starts_the_best_and_returns_its_code(program, tmp_path):
    mapped = {"train_micro_batch_size_per_gpu": "--micro"}
    assert autotune(program(arg_mappings=mapped), "run", lambda line: None) == 7
    assert (tmp_path / "ran.txt").read_text().splitlines() == [
        "--micro 2",
        "--micro 4",
        "--micro 8",
        "--micro 8",
    ]


def test_the_least_latency_is_that_of_the_smallest_batch(program, tmp_path):
    autotune(program(metric="latency"), "tune", lambda line: None)
    assert results(tmp_path)[1]["train_micro_batch_size_per_gpu"] == 2


def test_wrong_words_are_named(program, tmp_path):
    with pytest.raises(ConfigError, match="give tune or run"):
        autotune(program(), "walk")
    with pytest.raises(ConfigError, match="metric\" is 'speed'"):
        autotune(program(metric="speed"), "run")
    with pytest.raises(ConfigError, match='stage" is 4'):
        autotune(program(stage=[4]), "run")
    with pytest.raises(ConfigError, match="none of the 1 trials succeeded"):
        autotune(program(min_train_micro_batch_size_per_gpu=64), "run")
    with pytest.raises(ConfigError, match='"autotuning.overwrite" is false'):
        autotune(program(overwrite=False), "run")
    with pytest.raises(ConfigError, match="the command names none"):
        program_of([], ["fake.py"])


def test_a_dry_run_shows_the_trials_and_touches_nothing(program, tmp_path, capsys):
    program(
        "all", max_train_batch_size=16, results_dir="r", tuner_num_trials=9
    )  # writes ds.json
    old = tmp_path / "r" / "z0_gas2_tmbspg2"
    old.mkdir(parents=True)
    words = "--autotuning run --dry-run --num_gpus 2 fake.py --deepspeed_config ds.json"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    # Updates of 2 micro-batches: 2 × 8 samples of one rank are the most.
    stages = [line for line in lines if "ZeRO stage" in line]
    assert stages == [
        f"  ZeRO stage {stage}: micro-batches of 2, 4, 8 samples, 2 of them in an update"
        for stage in range(4)
    ]
    assert "at most 9 trials" in "".join(lines)
    [first] = [line for line in lines if line.startswith("the first trial: ")]
    assert "--num_gpus=2 fake.py" in first and "--dry-run" not in first
    assert first.endswith(f"--deepspeed_config {old}/ds_config.json")
    # Nothing was run, written or removed.
    assert {path.name for path in tmp_path.iterdir()} == {"fake.py", "ds.json", "r"}
    assert list((tmp_path / "r").iterdir()) == [old]


def test_what_does_not_fit_is_left_out():
    # 10 parameters: 160 bytes of state, and 40 bytes of activations for each sample
    known = Trial(0, 2, 1, {"num_params": 10, "memory": 240, "memory_of_device": 320})
    assert state_bytes(10, 0, 4) == 160 and state_bytes(10, 3, 4) == 40
    assert fits(Trial(0, 4, 1), [known], 1) and not fits(Trial(0, 8, 1), [known], 1)
    assert fits(Trial(3, 7, 1), [known], 4) and not fits(Trial(3, 8, 1), [known], 4)
    assert fits(Trial(0, 8, 1), [Trial(0, 2, 1)], 1)


def engine_of(path=None, **block):
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "autotuning": {"enabled": True, "model_info": {"profile": True}, **block},
    }
    if path is not None:
        config["autotuning"]["metric_path"] = str(path)
    engine, *_ = megatron_ds.initialize(
        model=nn.Linear(4, 5), config=config, mpu=Mesh(Grid.fit(1), 0)
    )
    return engine


def train(engine, updates):
    for _ in range(2 * updates):
        engine.backward(engine(torch.ones(3, 4)).square().mean())
        engine.step()


def test_an_engine_measures_its_trial_and_ends(tmp_path):
    engine = engine_of(tmp_path / "m.json", start_profile_step=1, end_profile_step=3)
    with pytest.raises(SystemExit) as end:
        train(engine, 9)
    assert end.value.code == 0 and engine.global_steps == 4
    found = json.loads((tmp_path / "m.json").read_text())
    assert math.isclose(found["throughput"], 6 / (found["latency"] / 1000))
    # forward: 2 · 3 · 4 · 5; three times that, for two micro-batches
    flops = found["FLOPS_per_gpu"] * found["latency"] / 1000
    assert math.isclose(flops, 2 * 3 * 4 * 5 * 3 * 2)
    assert found["num_params"] == 25 and found["ranks"] == 1
    assert 0 < found["memory"] < found["memory_of_device"]


def test_without_a_file_for_the_numbers_an_engine_trains_on(tmp_path):
    engine = engine_of(start_profile_step=1, end_profile_step=1)
    train(engine, 5)
    assert engine.global_steps == 5
    for start in (5, 0):
        with pytest.raises(ConfigError, match="Give 1 and a larger number"):
            engine_of(tmp_path / "m.json", start_profile_step=start, end_profile_step=3)


# ---- Orders of the trials.

A_MODEL = (
    0.25,
    0.05,
    0.4,
)  # seconds of a micro-batch, a sample and a pass over the parameters


def measured(stage, micro, steps=2):
    """A trial whose time follows the model exactly."""
    trial = Trial(stage, micro, steps)
    seconds = sum(map(math.prod, zip(features(trial), A_MODEL, strict=True)))
    trial.numbers = {"latency": 1000 * seconds, "throughput": micro * steps / seconds}
    return trial


def test_the_model_of_the_time_is_found_from_trials_that_follow_it():
    trials = [measured(0, 1), measured(0, 8), measured(2, 4), measured(3, 2, steps=4)]
    assert fitted(trials) == pytest.approx(A_MODEL)
    # A time that falls with the samples leaves no negative share.
    odd = [Trial(0, 1, 1, {"latency": 100.0}), Trial(0, 8, 1, {"latency": 90.0})]
    assert (fitted(odd) >= 0).all() and predicted(Trial(0, 4, 1), fitted(odd)) > 0


def test_the_model_chooses_the_fastest_of_all_that_are_left():
    left = [Trial(stage, micro, 2) for stage in (1, 2, 3) for micro in (1, 4, 16)]
    known = [measured(1, 2), measured(3, 2), measured(2, 8)]
    best = max(
        left, key=lambda trial: measured(trial.stage, trial.micro).numbers["throughput"]
    )
    assert left[model_choice(left, known, "throughput")] is best
    assert left[model_choice(left, known, "latency")].micro == 1
    # The first two are the ends of the list.
    assert model_choice(left, [], "throughput") == 0
    assert model_choice(left, known[:1], "throughput") == len(left) - 1


@pytest.mark.parametrize("tuner", ["random", "model_based"])
def test_all_stages_are_searched_in_an_order_of_their_own(program, tmp_path, tuner):
    made = program("all", tuner_type=tuner, max_train_micro_batch_size_per_gpu=8)
    assert autotune(made, "tune", lambda line: None) == 0
    trials, best = results(tmp_path)
    # The fastest is found; stages 2 and 3 fail, with their smallest size at the latest.
    assert best["zero_optimization"]["stage"] == 1
    assert best["train_micro_batch_size_per_gpu"] == 8
    assert "z1_gas2_tmbspg8" in trials


def test_the_model_needs_fewer_trials_than_the_grid(program, tmp_path):
    made = program(
        [0, 1],
        tuner_type="model_based",
        max_train_micro_batch_size_per_gpu=8,
        tuner_early_stopping=1,
    )
    assert autotune(made, "tune", lambda line: None) == 0
    trials, best = results(tmp_path)
    assert len(trials) < 6 and best["train_micro_batch_size_per_gpu"] == 8


def test_an_unknown_tuner_is_an_error(program):
    with pytest.raises(ConfigError, match="bayes.*gridsearch, random, model_based"):
        autotune(program(tuner_type="bayes"), "tune")
