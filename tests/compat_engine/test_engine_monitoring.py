"""What an engine prints and records: keys without effect, the line of a step, curves in files and at
services."""

import glob
import json
import logging
import sys
import zipfile
from types import SimpleNamespace

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


# -------------------------------------------------------------------------------------------- services
WANDB = {"enabled": True, "project": "p", "team": "t", "group": "g"}
COMET = {"enabled": True, "project": "p", "workspace": "w", "online": False}


def three_updates(engine):
    """The points of the loss and of a curve of the program, as (name, samples) → value."""
    points = {}
    for step in range(3):
        loss = engine(torch.full((4, 3), step + 1.0)).square().mean()
        engine.backward(loss)
        engine.step()
        points["Train/Samples/train_loss", 4 * step + 4] = loss.item()
        points["Train/Samples/lr", 4 * step + 4] = 0.01
    engine.monitor.write_events([("mine", 2.0, 12)])
    return points | {("mine", 12): 2.0}


class Runs:
    """W&B's `init`; keeps its arguments and the points of its run."""

    def __init__(self):
        self.points = {}

    def init(self, **options):
        self.options = options
        return self

    def log(self, values, step):
        self.points |= {(name, step): value for name, value in values.items()}


def test_wandb_gets_deepspeeds_curves_over_samples(monkeypatch):
    runs = Runs()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=runs.init))
    expected = three_updates(one(CONFIG | {"wandb": WANDB}))
    assert runs.points == pytest.approx(expected)
    named = {name: runs.options[name] for name in ("project", "entity", "group")}
    assert named == {"project": "p", "entity": "t", "group": "g"}
    assert runs.options["config"]["optimizer"]["lr"] == 0.01


def test_a_service_without_its_package_is_left_out_with_a_warning(monkeypatch, caplog):
    """A block that only asks for curves ends no program."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    engine = one(CONFIG | {"wandb": WANDB})
    assert not engine.monitor.enabled
    [line] = [r.getMessage() for r in caplog.records if "wandb" in r.getMessage()]
    assert '"wandb.project" needs the package wandb' in line and "pip install" in line


def test_curves_go_to_the_other_files_without_tensorboards_package(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    blocks = {
        name: {"enabled": True, "output_path": f"{tmp_path}/{name}", "job_name": "j"}
        for name in ("tensorboard", "csv_monitor")
    }
    three_updates(one(CONFIG | blocks))
    assert list(tmp_path.glob("csv_monitor/**/*.csv"))
    assert not list(tmp_path.glob("tensorboard/**/events*"))
    assert '"tensorboard.output_path" needs the package tensorboard' in caplog.text


def test_a_service_that_cannot_begin_is_left_out_with_a_warning(monkeypatch, caplog):
    def failing(**_):
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=failing))
    engine = one(CONFIG | {"wandb": WANDB})
    assert not engine.monitor.enabled
    assert '"wandb.project": W&B cannot start a run: no network' in caplog.text


def test_an_offline_run_of_wandb_is_written_to_its_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    engine = one(CONFIG | {"wandb": WANDB})
    three_updates(engine)
    wandb.finish()
    assert glob.glob(f"{tmp_path}/wandb/offline-run-*/run-*.wandb")


def test_an_archive_of_comet_has_deepspeeds_curves(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml")
    monkeypatch.chdir(tmp_path)
    engine = one(CONFIG | {"comet": COMET})
    expected = three_updates(engine)
    engine.destroy()
    [path] = glob.glob(f"{tmp_path}/.cometml-runs/*.zip")
    with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
        messages = map(json.loads, lines)
        metrics = [
            m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"
        ]
    found = {(m["metricName"], m["step"]): m["metricValue"] for m in metrics}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
