"""The check of a GPU implementation before it is used: what passes, what is disabled, what is logged."""

import logging
import subprocess
import sys

import pytest
import torch

from megatron_ds.errors import KernelError
from megatron_ds.extensions.kernels.gpu import norm_kernels, self_check
from megatron_ds.extensions.kernels.gpu.self_check import (
    failure,
    reason_against_implementation,
)
from megatron_ds.ops import kernel_table
from megatron_ds.ops.kernel_table import (
    GPU,
    OPERATIONS,
    Operation,
    random_tensors,
)
from tests.harness.emulated import compile_together, emulated_gpu
from tests.harness.limits import HUNG
from tests.harness.stand_in_gpu import stand_in_gpu
from tests.kernels import test_contract

pytestmark = pytest.mark.one_in(2, together=True)

CPU = torch.device("cpu")


def wrong_at(index, by):
    """RMSNorm by the kernels, with one element wrong."""

    def function(x, weight, eps):
        y = norm_kernels.rms_norm(x, weight, eps)
        spoiled = torch.zeros_like(y)
        spoiled[index] = by
        return y + spoiled

    return function


def wrong_backward(x, weight, eps):
    return norm_kernels.rms_norm(x + 1e-3 * (x - x.detach()), weight, eps)


def without_kernels(x, weight, eps):
    raise TypeError("an argument is missing")


@pytest.fixture
def gpu(tmp_path):
    with stand_in_gpu(tmp_path) as gpu:
        yield gpu


@pytest.fixture
def operation():
    @Operation
    def checked_norm(x, weight, eps):
        """RMSNorm in torch's operations."""
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @checked_norm.example
    def _example(rows, width, dtype, device):
        return (*random_tensors(dtype, device, (rows, width), (width,)), 1e-5)

    yield checked_norm
    del OPERATIONS["checked_norm"]


def entry_of(
    operation, function=norm_kernels.rms_norm, fits=norm_kernels.fits, name="cuda"
):
    operation.implementation(name, devices=GPU, dtypes=(torch.float32,), fits=fits)(
        function
    )
    return operation.implementations[-2]


def test_right_kernels_pass_without_a_word(gpu, operation, caplog):
    assert (
        failure(operation, entry_of(operation), torch.float32, CPU) == ""
        and not caplog.records
    )
    assert {"norm_backward", "norm_forward"} <= {
        e.partition("<")[0] for e in gpu.compiler.compilations
    }


def test_each_size_of_the_check_is_compared_without_a_gpu_for_all_operations():
    assert set(self_check.SIZES) <= set(test_contract.SIZES)


NORM_WIDTHS, VOCABULARIES = (4096, 12288, 65536), (32000, 50304, 151936)
WIDTHS = {
    "residual_norm": NORM_WIDTHS,
    "layer_norm": NORM_WIDTHS,
    "rms_norm": NORM_WIDTHS,
    "cross_entropy_facts": VOCABULARIES,
    "cross_entropy_gradient_": VOCABULARIES,
    "masked_softmax": (4096, 16384),
    "swiglu": (11008, 28672),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_kernels_pass_in_the_widths_of_models(name, dtype):
    """`check_widths` compares kernels in this way, and must disable no right one."""
    operation = OPERATIONS[name]
    entry = next(entry for entry in operation.implementations if entry.name == "cuda")
    compare = lambda: [
        failure(operation, entry, dtype, CPU, [(self_check.ROWS, width)])
        for width in WIDTHS[name]
    ]
    compile_together(compare)
    with emulated_gpu():
        assert compare() == [""] * len(WIDTHS[name])


def test_the_first_size_that_the_kernels_take_is_compared(gpu, operation):
    entry = entry_of(
        operation, fits=lambda x, *_: "too wide" if x.shape[-1] > 100 else ""
    )
    assert failure(operation, entry, torch.float32, CPU) == ""
    assert any(
        "norm_forward<float, 24, " in expression
        for expression in gpu.compiler.compilations
    )
    assert not any("1000" in expression for expression in gpu.compiler.compilations)


@pytest.mark.parametrize(
    "function, fits, reason",
    [
        (
            wrong_at((2, 999), 1e-3),
            norm_kernels.fits,
            "3 rows of 1000 elements of torch.float32 are wrong by ",
        ),
        (
            wrong_at((0, 0), float("nan")),
            norm_kernels.fits,
            "are wrong by inf times the tolerance",
        ),
        (wrong_backward, norm_kernels.fits, "are wrong by "),
        (norm_kernels.rms_norm, lambda *_: "never", "it takes no example"),
        (without_kernels, norm_kernels.fits, "TypeError: an argument is missing"),
    ],
    ids=["one element", "nan", "backward", "takes nothing", "error"],
)
def test_wrong_kernels_are_disabled_with_a_warning_that_names_them(
    gpu, operation, caplog, function, fits, reason
):
    entry = entry_of(operation, function, fits)
    with caplog.at_level(logging.WARNING):
        assert reason in failure(operation, entry, torch.float32, CPU)
    assert len(caplog.records) == 1 and reason in caplog.text
    launches = "kernels norm_forward, norm_backward"
    assert (launches in caplog.text) == (" wrong by " in reason)
    assert "so torch's operations compute checked_norm there" in caplog.text


def test_kernels_that_do_not_run_are_disabled(gpu, operation, caplog):
    gpu.fail_next_launch(700)
    with caplog.at_level(logging.WARNING):
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failure(
            operation, entry_of(operation), torch.float32, CPU
        )
    assert "kernels norm_forward (norm.cu) failed" in caplog.text


def test_the_backward_is_compared_whatever_mode_the_first_call_is_in(gpu, operation):
    """The first call of an operation may be an evaluation, in which autograd is off."""
    right, wrong = entry_of(operation), entry_of(operation, wrong_backward)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            assert failure(operation, right, torch.float32, CPU) == ""
            assert failure(operation, wrong, torch.float32, CPU)


def test_a_check_leaves_the_random_numbers_of_the_run_alone(gpu, operation):
    def drawing(x, weight, eps):
        torch.rand(3)
        return norm_kernels.rms_norm(x, weight, eps)

    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    assert failure(operation, entry_of(operation, drawing), torch.float32, CPU) == ""
    assert torch.equal(torch.randn(4), expected)


@pytest.mark.parametrize(
    "name, only",
    [
        ("quantize", 4),
        ("quantize", 8),
        ("dequantize", 4),
        ("dequantize", 8),
    ],
)
def test_each_format_is_checked(name, only):
    """A kernel that is wrong for one number of bits is disabled."""
    operation = OPERATIONS[name]

    def wrong(*arguments):
        made = operation.in_torch(*arguments)
        first, *others = made if isinstance(made, tuple) else (made,)
        spoiled = (
            torch.where(first > 0, first + 1, first) if only in arguments else first
        )
        return (spoiled, *others) if others else spoiled

    for function, is_wrong in ((wrong, True), (operation.in_torch, False)):
        entry = kernel_table.Implementation("cuda", function)
        assert bool(failure(operation, entry, torch.float32, CPU)) is is_wrong


# ------------------------------------------------------------------ in the table of kernels
class OneGpu:
    """torch.cuda as far as the check asks for it."""

    capturing = False
    is_current_stream_capturing = classmethod(lambda cls: cls.capturing)
    current_device = staticmethod(lambda: 0)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """The current CUDA device is usable; its tensors are those of the CPU."""
    compare = self_check.failure
    monkeypatch.setattr(self_check.torch, "cuda", OneGpu)
    monkeypatch.setattr(self_check, "reason_against", lambda device: "")
    monkeypatch.setattr(self_check, "failure", lambda *those: compare(*those[:-1], CPU))


@pytest.mark.parametrize(
    "function, chosen",
    [(norm_kernels.rms_norm, ["cuda", "torch"]), (wrong_at((0, 0), 1.0), ["torch"])],
    ids=["right", "wrong"],
)
def test_the_table_has_only_kernels_that_are_right(
    gpu, operation, as_if_on_a_gpu, caplog, function, chosen
):
    entry_of(operation, function)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            entries = kernel_table._candidates(operation, "cuda", torch.float32, "auto")
            assert [entry.name for entry in entries] == chosen
    assert len(caplog.records) == (len(chosen) == 1)
    assert sum("norm_forward" in e for e in gpu.compiler.compilations) == 1


def test_plans_check_nothing(gpu, operation, as_if_on_a_gpu):
    entry_of(operation, wrong_at((0, 0), 1.0))
    assert operation.first_choice("meta", torch.float32) == "cuda"
    assert not gpu.compiler.compilations


def test_other_implementations_for_gpus_need_no_compiler(operation, monkeypatch):
    monkeypatch.setattr(self_check, "reason_against", lambda device: "no NVRTC")
    assert (
        reason_against_implementation(
            operation, entry_of(operation, name="flash"), torch.float32
        )
        == ""
    )
    assert (
        reason_against_implementation(operation, entry_of(operation), torch.float32)
        == "no NVRTC"
    )


def test_kernels_are_not_checked_in_the_capture_of_a_graph(
    operation, as_if_on_a_gpu, monkeypatch
):
    monkeypatch.setattr(OneGpu, "capturing", True)
    entry_of(operation)
    with pytest.raises(
        KernelError,
        match="the kernels of checked_norm are checked at its first call, which "
        "is in the capture of a CUDA graph here. Run the step once",
    ):
        kernel_table._candidates(operation, "cuda", torch.float32, "auto")


def test_the_check_is_registered_whichever_operation_is_imported_first():
    """Without it an implementation for GPUs would run unchecked."""
    code = (
        "import megatron_ds.ops.product; from megatron_ds.ops.kernel_table import CHECKS_BEFORE_USE, load_kernels; "
        "load_kernels(); assert 'cuda' in CHECKS_BEFORE_USE"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HUNG)
