"""The benchmarks of `make gpu` run on any machine: on the CPU, and their CUDA calls on a GPU that does not
exist."""

import json

import pytest
import torch

from benchmarks import gpu_day, gpu_train, kernels
from megatron_ds.ops import kernel_table
from tests.harness.fake_cuda import FakeGpu, fake_cuda


def test_every_operation_with_an_example_is_measured():
    args = kernels.parse_arguments(["--device", "cpu", "--rehearse", "--no-compile", "--repeats", "1",
                                    "--dtypes", "fp32"])
    found = kernels.run(args)
    with_examples = {name for name, op in kernels.load_operations().items() if op.make_example is not None}
    assert {row["operation"] for row in found["rows"]} == with_examples >= {"rms_norm", "gelu", "swiglu"}
    assert [row for row in found["rows"] if row["why"]] == []
    norm = next(row for row in found["rows"] if row["operation"] == "rms_norm")
    assert norm["forward_us"] > 0 and norm["backward_us"] > 0 and norm["forward_percent"] > 0


def test_tensors_that_an_operation_changes_are_counted_as_written():
    adamw = kernels.load_operations()["adamw"]
    example = adamw.make_example(2, 8, torch.bfloat16, torch.device("cpu"))
    grad, first_row = 0, {1, 3, 4, 5}                 # weight, both moments and the 16-bit weight of a row
    changed = set(kernels.written(adamw, example))
    assert grad not in changed and 2 not in changed and first_row <= changed


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_model_is_measured_beside_its_plan(device):
    args = gpu_train.parse_arguments(["--device", device, "--steps", "2", "--rehearse", "--", "--kernels",
                                      "torch"])
    flags, layers = gpu_train.REHEARSED["gpt-tiny"]
    with kernel_table.selected("torch"), fake_cuda(), FakeGpu() as gpu:
        result = gpu_train.measure("gpt-tiny", flags, layers, args)
    assert result["layers"] == 2 and result["step_s"] > 0 and result["planned_gib"] > 0
    if device != "cpu":
        assert result["mfu"] > 0 and result["allocated_gib"] == 1 and not gpu.order.problems


def test_the_most_layers_that_fit_are_taken():
    args = gpu_train.parse_arguments(["--device", "cuda:0", "--rehearse"])
    flags, _ = gpu_train.REHEARSED["gpt-tiny"]
    with fake_cuda(), FakeGpu():
        _, planned, layers = gpu_train.fitting("tiny", flags, (64, 2), torch.device("cuda", 0),
                                               args.more)
        assert layers == 64 and planned > 0


def test_a_part_that_fails_or_hangs_costs_its_own_results_only(tmp_path):
    parts = (gpu_day.Part("fails", "PYTHON -c raise(SystemExit(3))", 20),
             gpu_day.Part("hangs", "PYTHON -c __import__('time').sleep(9)", 1),
             gpu_day.Part("missing", "no-such-tool", 5, tool="no-such-tool"))
    fails, hangs, missing = (gpu_day.run(part, tmp_path) for part in parts)
    assert fails["code"] == 3 and hangs["code"] == "stopped after 1 s"
    assert missing == {"skipped": "no-such-tool is not installed"}


def test_all_commands_name_files_and_flags_that_exist(tmp_path, monkeypatch):
    for part in (*gpu_day.PARTS, *gpu_day.REHEARSED):
        for word in part.command.split():
            if word.endswith(".py") or word.startswith("tests/"):
                assert (gpu_day.ROOT / word).exists(), word
    assert sum(part.seconds for part in gpu_day.PARTS) < 600
    monkeypatch.setattr(gpu_day, "REHEARSED", (gpu_day.Part("one", "PYTHON -c print('seen')", 20),))
    assert gpu_day.main(["--rehearse", "--output", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["parts"]["one"]["output"] == ["seen"]
