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
    parts = ["training", "training-beyond", "kernels", "training-torch-kernels"]
    monkeypatch.setenv("OUT", str(tmp_path))
    calls = ["--part", "headline", "rest"]
    assert gpu_day.main(["--rehearse", *calls, "--only", *parts]) == 0
    files = [tmp_path / f"gpu-{name}.json" for name in ("headline", "rest")]
    headline, rest = (json.loads(file.read_text()) for file in files)
    assert headline["machine"]["torch"] == torch.__version__
    assert headline["seconds"] < headline["estimate_s"] <= 540
    training = headline["parts"]["training"]
    kernels = rest["parts"]["kernels"]
    assert training["code"] == kernels["code"] == 0

    models = [*training["figures"], *rest["parts"]["training-beyond"]["figures"]]
    assert {m["model"] for m in models} == gpu_train.REHEARSED["all"].keys()
    for name in gpu_train.REHEARSED["headline"]:
        found = [m["micro_batches"] for m in models if m["model"] == name]
        assert found == [1, 3]
    for model in models:
        assert model["layers"] == 2 and model["step_s"] > 0 and model["planned_gib"] > 0
        assert all(
            abs(loss - math.log(131)) < 1 for loss in model["losses"]
        )  # untrained, 131 tokens

    by_torch = rest["parts"]["training-torch-kernels"]["figures"]
    assert {row["model"] for row in by_torch} == {"gpt-tiny"}
    assert all(row["step_s"] > 0 for row in by_torch)

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
    rows = gpu_peer.measure(gpu_train.SMALL, 2, 3, torch.device("cpu"), (1, 3))
    assert [row["micro_batches"] for row in rows] == [1, 3]
    for row in rows:
        assert row["step_s"] > 0 and row["tflops"] > 0
        assert 0 < row["loss"] < 2 * math.log(131)
