"""A kernel is compared once with its reference, on a small input, before a run relies on it.

Beside its wrapper each file of kernels has a case, and the table of kernels asks for it:

    def small_case(device: torch.device) -> Case:
        x = torch.randn(3, 264, device=device)
        return rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5), 2e-6

    @rms_norm.implementation("cuda", devices=GPU, available=checked(norm_kernels.small_case), ...)

A case covers the backward, too, and all kernels of the operation: it returns tuples of tensors then. Where a
result differs, or a kernel does not compile or run, a warning names the kernels, and torch's operations run.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from ...errors import KernelError
from .cuda_backend import reason_against
from .gpu_kernel import Launches, launches_recorded

logger = logging.getLogger(__name__)

# (result, expected, tolerance): tensors or equally long sequences of them. The tolerance is the largest
# absolute difference allowed, as a fraction of the largest expected magnitude of each tensor; 0: equal bits.
Case = tuple[torch.Tensor | Sequence[torch.Tensor], torch.Tensor | Sequence[torch.Tensor], float]
CaseFunction = Callable[[torch.device], Case]


def checked(case: CaseFunction) -> Callable[[], str]:
    """The `available` of an implementation: "" if GPU kernels run on the current device and the case is
    right there, else the reason. The case runs once for each device."""
    def available() -> str:
        if not torch.cuda.is_available():
            return reason_against(torch.device("cuda"))
        return _reason(case, torch.cuda.current_device())

    return available


@functools.cache
def _reason(case: CaseFunction, ordinal: int) -> str:
    device = torch.device("cuda", ordinal)
    return reason_against(device) or failure_of(case, device)


def failure_of(case: CaseFunction, device: torch.device) -> str:
    """Run a case: "" if it is right, else what is wrong, which is also logged with the kernels' names.

    Leaves the random numbers of the process as they are. Raises KernelError during the capture of a CUDA
    graph, which would capture the case.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError("kernels are chosen at the first call of an operation, which is in the capture of "
                          "a CUDA graph here. Run the step once before the capture.")
    devices = [device] if device.type == "cuda" else []
    launches: Launches = {}
    try:
        with (launches_recorded() as launches, torch.random.fork_rng(devices), torch.inference_mode(False),
              torch.enable_grad(), torch.autocast(device.type, enabled=False)):
            reason = _difference(*case(device))
    except (RuntimeError, KernelError) as error:            # torch's errors are RuntimeErrors
        reason = str(error)
    if not reason and not launches:
        reason = "its case launches no kernel"
    if reason:
        logger.warning("%s failed the check on %s and is not used, torch's operations run instead: %s",
                       _names(launches) or getattr(case, "__module__", "a kernel"), device, reason)
    return reason


def _difference(got: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor | Sequence[torch.Tensor],
                tolerance: float) -> str:
    got, expected = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (got, expected))
    if len(got) != len(expected):
        return f"the case returns {len(got)} results for {len(expected)} expected ones"
    reasons = (_difference_of_one(*pair, tolerance) for pair in zip(got, expected))
    return next((f"result {i + 1} of {len(got)} {reason}" for i, reason in enumerate(reasons) if reason), "")


def _difference_of_one(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if got.shape != expected.shape:
        return f"has the shape {list(got.shape)} in place of {list(expected.shape)}"
    if tolerance == 0:
        return "" if torch.equal(got, expected) else "has other bits"
    if not expected.numel():
        return ""
    got, expected = got.detach().double(), expected.detach().double()
    error, allowed = (got - expected).abs().max().item(), tolerance * expected.abs().max().item()
    return "" if error <= allowed else f"differs by {error:.2g}, more than {allowed:.2g}"       # or is NaN


def _names(launches: Launches) -> str:
    """The kernels that were launched: "norm_forward, norm_backward (norm.cu)"."""
    kernels = dict.fromkeys(kernel for kernel, _ in launches)
    files = dict.fromkeys(kernel.file for kernel in kernels)
    return f"{', '.join(kernel.name for kernel in kernels)} ({', '.join(files)})" if kernels else ""
