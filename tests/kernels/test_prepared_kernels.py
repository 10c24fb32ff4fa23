"""The kernels that a run launches are known, and compiled, before its first step."""

import logging
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import KernelError
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.ops.gpu import gpu_kernel, norm_kernels
from megatron_ds.ops.kernel_table import GPU, Operation
from megatron_ds.ops.norms import rms_norm
from megatron_ds.planning.run_model import describe_layers
from megatron_ds.planning.run_plan import plan_run
from megatron_ds.training import prepared_kernels
from megatron_ds.training.prepared_kernels import prepare_kernels
from tests.harness.stand_in_gpu import stand_in_gpu

JOB = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "130",
       "--lr", "1", "--train-iters", "1", "--mock-data", "--normalization", "RMSNorm", "--bf16",
       "--seq-length", "16", "--micro-batch-size", "2"]


def engine(device="cuda", *flags):
    """What preparing reads of an engine."""
    config = parse([*JOB, *flags], world_size=1)
    mesh = fake_mesh(Grid.fit(1), 0, torch.device(device))
    plan = plan_run(config, describe_layers(config, mesh, torch.device("meta")))
    return SimpleNamespace(config=config, mesh=mesh, plan=plan, keeps_gathered=False)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU whose RMSNorm is ours; its kernels are hollow."""
    monkeypatch.setattr(prepared_kernels, "reason_against", lambda device: "")
    monkeypatch.setattr(prepared_kernels, "kernels_text", lambda device, dtype, used: "")
    before = list(rms_norm.implementations)
    if "cuda" not in [entry.name for entry in before]:
        rms_norm.implementation("cuda", devices=GPU, fits=norm_kernels.fits)(norm_kernels.rms_norm)
    with stand_in_gpu(tmp_path, hollow=True) as gpu:
        monkeypatch.setattr(gpu_kernel, "cuda_backend", lambda device: gpu.backend)
        yield gpu
    rms_norm.implementations[:] = before


def test_forward_and_backward_of_a_model_are_compiled_before_the_first_step(gpu):
    assert isinstance(rms_norm, Operation)
    line = prepare_kernels(engine())
    # Other operations of the model may have kernels, too.
    of_norm = sorted(e.partition(", 1")[0] for e in gpu.compiler.compilations if e.startswith("norm_"))
    assert {"norm_backward", "norm_forward"} <= {e.partition("<")[0] for e in of_norm}
    assert all("<bf16, 64" in e for e in of_norm if e.startswith(("norm_forward<", "norm_backward<")))
    assert line == gpu.backend.summary() and f"kernels: {len(gpu.compiler.compilations)} compiled in " in line


def test_nothing_is_compiled_for_torchs_operations_or_a_cpu(gpu):
    assert prepare_kernels(engine("cuda", "--kernels", "torch")) == prepare_kernels(engine("cpu")) == ""
    assert not gpu.compiler.compilations


def test_a_kernel_that_does_not_compile_is_a_warning_before_the_first_step(gpu, monkeypatch, caplog):
    def fail(*_):
        raise KernelError("norm_forward<bf16> does not compile")

    monkeypatch.setattr(gpu.compiler, "compile", fail)
    with caplog.at_level(logging.WARNING):
        assert prepare_kernels(engine()) == ""
    assert "not all kernels were compiled before the first step: norm_forward<bf16>" in caplog.text
