"""The kernels that a run launches are known, and compiled, before its first step."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels import prepared_kernels
from megatron_ds.extensions.kernels.gpu import gpu_kernel, norm_kernels, self_check
from megatron_ds.extensions.kernels.prepared_kernels import prepare_kernels
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.ops import kernel_table
from megatron_ds.ops.activation import gelu, swiglu
from megatron_ds.ops.kernel_table import GPU, Operation
from megatron_ds.ops.norms import rms_norm
from megatron_ds.planning.run_model import describe_layers
from megatron_ds.planning.run_plan import plan_run
from tests.harness.emulated import emulated_gpu
from tests.harness.stand_in_gpu import stand_in_gpu

CPU = torch.device("cpu")
JOB = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 130 --lr 1 "
    "--train-iters 1 --mock-data --normalization RMSNorm --bf16 --seq-length 16 "
    "--micro-batch-size 2"
).split()


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
    monkeypatch.setattr(prepared_kernels, "_choose", lambda *_: None)
    monkeypatch.setattr(prepared_kernels, "check_widths", lambda calls, device: None)
    before = list(rms_norm.implementations)
    if "cuda" not in [entry.name for entry in before]:
        rms_norm.implementation("cuda", devices=GPU, fits=norm_kernels.fits)(
            norm_kernels.rms_norm
        )
    with stand_in_gpu(tmp_path, hollow=True) as gpu:
        monkeypatch.setattr(gpu_kernel, "cuda_backend", lambda device: gpu.backend)
        yield gpu
    rms_norm.implementations[:] = before


def test_forward_and_backward_of_a_model_are_compiled_before_the_first_step(gpu):
    assert isinstance(rms_norm, Operation)
    line = prepare_kernels(engine())
    # Other operations of the model may have kernels, too.
    of_norm = sorted(
        e.partition(", 1")[0]
        for e in gpu.compiler.compilations
        if e.startswith("norm_")
    )
    assert {"norm_backward", "norm_forward"} <= {e.partition("<")[0] for e in of_norm}
    assert all(
        "<bf16, 64" in e
        for e in of_norm
        if e.startswith(("norm_forward<", "norm_backward<"))
    )
    assert (
        line == gpu.backend.summary()
        and f"kernels: {len(gpu.compiler.compilations)} compiled in " in line
    )


def test_nothing_is_compiled_for_torchs_operations_or_a_cpu(gpu):
    assert (
        prepare_kernels(engine("cuda", "--kernels", "torch"))
        == prepare_kernels(engine("cpu"))
        == ""
    )
    assert not gpu.compiler.compilations


def test_a_kernel_that_does_not_compile_is_a_warning_before_the_first_step(
    gpu, monkeypatch, caplog
):
    def fail(*_):
        raise KernelError("norm_forward<bf16> does not compile")

    monkeypatch.setattr(gpu.compiler, "compile", fail)
    with caplog.at_level(logging.WARNING):
        assert prepare_kernels(engine()) == ""
    assert (
        "not all kernels were compiled before the first step: norm_forward<bf16>"
        in caplog.text
    )


# ------------------------------------------------------------------ the widths of a model
@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Kernels of the current CUDA device are used without a check; its tensors are those of the CPU."""
    monkeypatch.setattr(prepared_kernels, "reason_against", lambda device: "")
    monkeypatch.setattr(self_check, "reason_against_implementation", lambda *_: "")
    check = self_check.check_widths
    monkeypatch.setattr(
        prepared_kernels, "check_widths", lambda calls, device: check(calls, CPU)
    )
    kernel_table._candidates.cache_clear()
    yield
    kernel_table._candidates.cache_clear()


LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()
DROPS = "--normalization LayerNorm --hidden-dropout 0.1 --attention-dropout 0.1".split()
KEPT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def expressions(launches):
    return {kernel.expression(template) for kernel, template in launches}


@pytest.mark.parametrize(
    "flags",
    [
        [
            *LLAMA,
            *KEPT,
            *"--hidden-size 2048 --vocab-size 32000 --num-query-groups 2 --group-query-attention".split(),
        ],
        [
            *LLAMA,
            *KEPT,
            *"--hidden-size 40960 --ffn-hidden-size 65536".split(),
        ],  # norms in loops
        [*DROPS, "--hidden-size", "64", "--squared-relu"],
        [
            *DROPS,
            *"--hidden-size 20000 --seq-length 16384".split(),
        ],  # softmax of whole blocks
        [
            *LLAMA,
            *KEPT,
            *"--hidden-size 1024 --num-experts 4 --moe-router-topk 2".split(),
        ],
    ],
    ids=["llama", "wide norms", "dropout", "long sequence", "experts"],
)
def test_every_kernel_of_a_step_is_checked_before_it(
    tmp_path, monkeypatch, as_if_on_a_gpu, flags
):
    """Instantiations that the step launches are among those that the checks launch."""
    launched, wanted, failure = [], {}, self_check.failure

    def recorded(*those):
        with gpu_kernel.launches_recorded() as launches:
            failure(*those)
        launched.extend(launches)
        return ""

    monkeypatch.setattr(self_check, "failure", recorded)
    monkeypatch.setattr(
        prepared_kernels, "compile_kernels", lambda launches, _: wanted.update(launches)
    )
    with stand_in_gpu(tmp_path, hollow=True):
        prepare_kernels(engine("cuda", *flags))
    assert len(wanted) >= 6
    assert expressions(wanted) <= expressions(launched)


def wrong_in(width):
    """RMSNorm by the kernels, wrong in rows of one length."""

    def function(x, weight, eps):
        y = norm_kernels.rms_norm(x, weight, eps)
        return y * 1.1 if x.shape[-1] == width else y

    return function


@pytest.mark.parametrize(
    "width, chosen", [(64, "torch"), (72, "cuda")], ids=["wrong", "right"]
)
def test_kernels_that_are_wrong_in_a_width_of_the_model_do_not_run(
    monkeypatch, as_if_on_a_gpu, caplog, width, chosen
):
    entry = replace(
        next(e for e in rms_norm.implementations if e.name == "cuda"),
        function=wrong_in(width),
    )
    monkeypatch.setattr(
        rms_norm, "implementations", [entry, rms_norm.implementations[-1]]
    )
    monkeypatch.setattr(
        prepared_kernels, "compile_kernels", lambda launches, device: "compiled"
    )
    compared, difference = [], self_check._difference

    def of_norms(
        operation, *those
    ):  # the others would be compiled for the emulator, too
        compared.append(operation.name)
        return difference(operation, *those) if operation is rms_norm else ""

    monkeypatch.setattr(self_check, "_difference", of_norms)
    with emulated_gpu(), caplog.at_level(logging.WARNING):
        assert prepare_kernels(engine()) == "compiled"
    assert {"rms_norm", "dropout_add", "cross_entropy_facts"} <= set(compared)
    assert rms_norm.first_choice("cuda", torch.bfloat16) == chosen
    assert (
        rms_norm.first_choice("cuda", torch.float32) == "cuda"
    )  # which was not compared
    assert ("3 rows of 64 elements of torch.bfloat16 are wrong by " in caplog.text) == (
        chosen == "torch"
    )


def test_kernels_that_do_not_take_a_width_are_left_alone(as_if_on_a_gpu, caplog):
    calls = {(rms_norm, torch.bfloat16, 1 << 17): None}
    with caplog.at_level(logging.WARNING):
        self_check.check_widths(calls, CPU)
    assert rms_norm.has("cuda", "cuda", torch.bfloat16) and not caplog.records


def test_widths_are_those_of_calls_with_rows():
    with kernel_table.calls_recorded() as calls:
        swiglu(torch.ones(2, 3, 16))
        rms_norm(
            torch.ones(5, 8, dtype=torch.bfloat16),
            torch.ones(8, dtype=torch.bfloat16),
            1e-5,
        )
        gelu(torch.ones(7))
    swiglu(torch.ones(2, 24))
    assert list(calls) == [(swiglu, torch.float32, 16), (rms_norm, torch.bfloat16, 8)]


@pytest.mark.parametrize("optimizer, update", [("adam", "adamw"), ("lion", "lion")])
def test_operations_of_a_step_and_the_update_are_chosen_before_it(
    monkeypatch, optimizer, update
):
    """The choice checks an implementation against torch, which must not wait for the first step."""
    chosen = set()
    monkeypatch.setattr(
        Operation,
        "first_choice",
        lambda operation, *where: chosen.add((operation.name, *where)),
    )
    calls = {(rms_norm, torch.bfloat16, 64): None, (rms_norm, torch.bfloat16, 8): None}
    prepared_kernels._choose(calls, optimizer)
    assert chosen == {
        ("rms_norm", "cuda", torch.bfloat16),
        (update, "cuda", torch.float32),
    }
