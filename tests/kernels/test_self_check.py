"""The check of each kernel before it is used: what passes, what is disabled, and what the log has of it."""

import logging

import pytest
import torch

from megatron_ds.errors import KernelError
from megatron_ds.ops.gpu import norm_kernels, self_check
from megatron_ds.ops.gpu.self_check import checked, failure_of
from megatron_ds.ops.kernel_table import Operation, text
from megatron_ds.ops.norms import reference_rms_norm
from tests.harness.stand_in_gpu import stand_in_gpu

CPU = torch.device("cpu")


def case_of(spoil=lambda y: y, expected=reference_rms_norm, tolerance=2e-6):
    def case(device):
        x, weight = torch.randn(3, 264, device=device), torch.randn(264, device=device)
        y = norm_kernels.rms_norm(x, weight, 1e-5)
        return spoil(y), expected(x, weight, 1e-5), tolerance
    return case


def wrong_at(index, by):
    def spoil(y):
        y = y.clone()
        y[index] += by
        return y
    return spoil


@pytest.fixture
def gpu(tmp_path):
    with stand_in_gpu(tmp_path) as gpu:
        yield gpu


def test_a_right_kernel_passes_without_a_word(gpu, caplog):
    assert failure_of(case_of(), CPU) == "" and not caplog.records


@pytest.mark.parametrize("case, reason", [
    (case_of(wrong_at((2, 263), 1e-3)), "result 1 of 1 differs by 0.001, more than "),
    (case_of(wrong_at((0, 0), float("nan"))), "result 1 of 1 differs by nan"),
    (case_of(wrong_at((1, 1), 1e-3), tolerance=0), "result 1 of 1 has other bits"),
    (case_of(lambda y: y[:2]), "result 1 of 1 has the shape [2, 264] in place of [3, 264]"),
    (case_of(lambda y: (y, y), lambda *_: (torch.zeros(1),)), "returns 2 results for 1 expected"),
    (lambda device: (torch.ones(1), torch.ones(1), 0), "its case launches no kernel")],
    ids=["one element", "nan", "bits", "shape", "count", "no launch"])
def test_a_wrong_kernel_is_disabled_with_a_warning(gpu, caplog, case, reason):
    with caplog.at_level(logging.WARNING):
        assert reason in failure_of(case, CPU)
    assert len(caplog.records) == 1
    assert "is not used, torch's operations run instead" in caplog.text and reason in caplog.text
    assert ("norm_forward (norm.cu) failed" in caplog.text) == ("no kernel" not in reason)


def test_a_kernel_that_does_not_run_is_disabled(gpu, caplog):
    gpu.fail_next_launch(700)
    with caplog.at_level(logging.WARNING):
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failure_of(case_of(), CPU)
    assert "norm_forward (norm.cu) failed" in caplog.text


def test_a_case_covers_the_backward_whatever_mode_the_first_call_is_in(gpu):
    """The first call of an operation may be an evaluation, in which autograd is off."""
    def case(device):
        x, dy = torch.randn(2, 3, 264, device=device)
        weight = torch.ones(264, device=device)
        gradient_by = lambda f: torch.autograd.grad(f(x.requires_grad_(), weight, 1e-5), x, dy)
        return gradient_by(norm_kernels.rms_norm), gradient_by(reference_rms_norm), 2e-6

    with torch.inference_mode():
        assert failure_of(case, CPU) == ""
    with torch.no_grad():
        assert failure_of(case, CPU) == ""


def test_a_case_leaves_the_random_numbers_of_the_run_alone(gpu):
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    failure_of(case_of(), CPU)
    assert torch.equal(torch.randn(4), expected)


# ------------------------------------------------------------------ in the table of kernels
class OneGpu:
    """torch.cuda as far as the check asks for it."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def current_device():
        return 0


def operation(available):
    """An operation whose "gpu" implementation returns 1, torch's 0; on CPU tensors."""
    made = Operation("checked_in_this_test", lambda x: 0)
    made.implementation("gpu", available=available)(lambda x: 1)
    return made


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """The current CUDA device is usable, and its tensors are those of the CPU."""
    from megatron_ds.ops import kernel_table
    monkeypatch.setattr(self_check.torch, "cuda", OneGpu)
    monkeypatch.setattr(self_check, "reason_against", lambda device: "")
    real = self_check.failure_of
    monkeypatch.setattr(self_check, "failure_of", lambda case, device: real(case, CPU))
    before = dict(kernel_table.OPERATIONS)
    yield
    kernel_table.OPERATIONS.clear()
    kernel_table.OPERATIONS.update(before)


@pytest.mark.parametrize("case, chosen", [(case_of(), 1), (case_of(wrong_at((0, 0), 1.0)), 0)],
                         ids=["right", "wrong"])
def test_the_table_uses_a_kernel_only_if_its_case_is_right(gpu, as_if_on_a_gpu, caplog, case, chosen):
    made = operation(checked(case))
    with caplog.at_level(logging.WARNING):
        assert [made(torch.ones(1)) for _ in range(3)] == [chosen] * 3
    assert len(caplog.records) == (not chosen)
    assert ("checked_in_this_test gpu" in text("cpu", torch.float32)) == bool(chosen)


def test_a_case_runs_once_for_a_device(gpu, as_if_on_a_gpu):
    calls = []

    def case(device):
        calls.append(device)
        return case_of()(device)

    available = checked(case)
    assert available() == available() == checked(case)() == "" and len(calls) == 1


def test_kernels_are_not_chosen_in_the_capture_of_a_graph(monkeypatch):
    class Capturing(OneGpu):
        @staticmethod
        def is_current_stream_capturing():
            return True

    monkeypatch.setattr(self_check.torch, "cuda", Capturing)
    with pytest.raises(KernelError, match="in the capture of a CUDA graph here. Run the step once before"):
        failure_of(case_of(), torch.device("cuda", 0))
