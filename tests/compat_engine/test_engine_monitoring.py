"""What an engine prints and records: keys without effect, the line of a step, TensorBoard and CSV files."""

import logging

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh

pytestmark = pytest.mark.threads

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def one(config=CONFIG):
    return megatron_ds.initialize(
        model=nn.Linear(3, 2), config=config, mpu=Mesh(Grid(), 0)
    ).engine


def test_keys_without_effect_are_accepted_and_listed(monkeypatch, capsys):
    monkeypatch.setattr(
        logging.getLogger(), "handlers", []
    )  # pytest configures logging
    one(
        config=CONFIG
        | {
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 1, "contiguous_gradients": True},
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "accepted, nothing to do:"
    assert [
        any(key in line for line in lines[1:])
        for key in ("wall_clock_breakdown", "contiguous_gradients")
    ] == [False, True]


def test_steps_per_print_prints(monkeypatch, capsys):
    monkeypatch.setattr(
        logging.getLogger(), "handlers", []
    )  # pytest configures logging
    engine = one(
        config=CONFIG
        | {"steps_per_print": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    )
    for _ in range(5):
        engine.backward(engine(torch.ones(4, 3)).mean())
        engine.step()
    lines = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["step 2", "skipped 0", "lr 5.000e-01"],
        ["step 4", "skipped 0", "lr 5.000e-01"],
    ]


def test_where_logging_is_configured_the_lines_go_there(caplog, capsys):
    engine = one(config=CONFIG | {"steps_per_print": 1, "train_batch_size": 2})
    with caplog.at_level(logging.INFO):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    assert "step 1 | skipped 0" in caplog.text and not capsys.readouterr().out


def test_a_disk_that_fails_below_tensorboard_does_not_end_the_program(tmp_path, caplog):
    engine = one(
        config=CONFIG
        | {
            "tensorboard": {
                "enabled": True,
                "output_path": str(tmp_path),
                "job_name": "mine",
            }
        }
    )
    (tmp_path / "mine").rmdir()
    (tmp_path / "mine").write_text("a file in the place of the folder")
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 3)).mean())
        engine.step()
    assert engine.global_steps == 2 and caplog.text.count("cannot write to") == 1


def test_tensorboard_and_csv_files_get_deepspeeds_curves_over_samples(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    config = CONFIG | {
        "fp16": {"enabled": True, "loss_scale": 8},
        "gradient_accumulation_steps": 2,
        "tensorboard": {
            "enabled": True,
            "output_path": str(tmp_path),
            "job_name": "mine",
        },
        "csv_monitor": {
            "enabled": True,
            "output_path": str(tmp_path),
            "job_name": "csv",
        },
        "flops_profiler": {"enabled": False},
        "autotuning": {"enabled": False},
    }
    engine = one(config=config)
    losses = []
    for _ in range(4):
        losses.append(engine(torch.ones(2, 3).half()).float().mean())
        engine.backward(losses[-1])
        engine.step()
    engine.monitor.write_events([("mine", 2.0, 8)])
    found = events.EventAccumulator(str(tmp_path / "mine"))
    found.Reload()
    points = lambda name: [
        (event.step, pytest.approx(event.value)) for event in found.Scalars(name)
    ]
    means = [
        (losses[0].item() + losses[1].item()) / 2,
        (losses[2].item() + losses[3].item()) / 2,
    ]
    assert points("Train/Samples/train_loss") == list(zip((4, 8), means)) and points(
        "mine"
    ) == [(8, 2.0)]
    assert points("Train/Samples/lr") == [(4, 0.01), (8, 0.01)] and points(
        "Train/Samples/loss_scale"
    ) == [(4, 8), (8, 8)]
    assert (
        tmp_path / "csv" / "Train_Samples_lr.csv"
    ).read_text() == "step,lr\n4,0.01\n8,0.01\n"
    assert (tmp_path / "csv" / "mine.csv").read_text() == "step,mine\n8,2.0\n"
