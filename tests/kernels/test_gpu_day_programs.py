"""`make gpu` rehearsed: the programs that measure a GPU run on the CPU, on tiny models and operations."""

import json
import math
import sys

import pytest
import torch

from benchmarks import gpu_day, gpu_peer, gpu_train
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes


def test_the_day_of_a_gpu_is_rehearsed_into_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "executable", warm_python()
    )  # of the processes of the parts
    file = tmp_path / "gpu-results.json"
    parts = ["training", "kernels", "training-torch-kernels"]
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_day.main(["--rehearse", "--only", *parts]) == 0, file.read_text()
    results = json.loads(file.read_text())
    assert results["machine"]["torch"] == torch.__version__
    training, kernels = (results["parts"][name] for name in ("training", "kernels"))
    assert training["code"] == kernels["code"] == 0

    models = {model["model"]: model for model in training["figures"]}
    assert models.keys() == gpu_train.REHEARSED.keys()
    for model in models.values():
        assert model["layers"] == 2 and model["step_s"] > 0 and model["planned_gib"] > 0
        assert all(
            abs(loss - math.log(131)) < 1 for loss in model["losses"]
        )  # untrained, 131 tokens

    [by_torch] = results["parts"]["training-torch-kernels"]["figures"]
    assert by_torch["model"] == "gpt-tiny" and by_torch["step_s"] > 0

    rows = kernels["figures"]["rows"]
    assert [row for row in rows if row["why"]] == []
    measured = {(row["operation"], row["dtype"]) for row in rows}
    for name in (
        "residual_norm",
        "masked_softmax",
        "cross_entropy_gradient_",
        "adamw",
        "split_rotary",
    ):
        assert {(name, "bf16"), (name, "fp32")} <= measured
    halves = [
        row
        for row in rows
        if row["operation"] == "residual_norm" and row["dtype"] == "bf16"
    ]
    assert all(row["forward_us"] > 0 and row["backward_percent"] > 0 for row in halves)
    assert kernels["output"][-1] == f"all {len(rows)} rows were measured"


def test_the_peer_trains(monkeypatch):
    """Plain torch with the sizes of our smallest model. Compiling it takes half a minute, so it is not here."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    peer = gpu_peer.measure(gpu_train.SMALL, 2, 3, torch.device("cpu"))
    assert peer["step_s"] > 0 and peer["tflops"] > 0
    assert 0 < peer["loss"] < 2 * math.log(131)
