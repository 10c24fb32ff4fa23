"""A GPU implementation is compared once with torch's operations, on a small input, before it is used.

The table of kernels asks `reason_against_implementation` when a process first needs an operation on a GPU for
a dtype, which compiles its kernels. The operation's example is the input, with its backward. Where a result
differs, or a kernel does not compile or run, a warning names the kernels, and torch's operations run.

Row lengths are template arguments, so the instantiations of a model are others than those of that input:
`check_widths` compares these, before the first step of a run.
"""

import logging
from collections.abc import Sequence

import torch

from ....errors import KernelError
from ....ops.kernel_table import CHECKS_BEFORE_USE, Calls, Implementation, Operation
from .cuda_backend import reason_against
from .gpu_kernel import Launches, launches_recorded
from .kernel_check import largest_error

logger = logging.getLogger(__name__)

KERNELS_OF_THIS_PACKAGE = "cuda"  # name of implementations by them
# (rows, width), of which the first is used that the implementation takes. Tests compare all of them without a
# GPU, so that no right kernel is disabled.
SIZES = ((3, 1000), (7, 24), (130, 40), (1, 8))
ROWS = 3  # of the widths of a model


def reason_against_implementation(
    operation: Operation, entry: Implementation, dtype: torch.dtype
) -> str:
    """Return why an implementation is not used on the current CUDA device; "" if it is. Logged.

    Raises KernelError during the capture of a CUDA graph, which would capture the comparison.
    """
    if entry.name != KERNELS_OF_THIS_PACKAGE:
        return ""
    if reason := reason_against(torch.device("cuda")):
        return reason
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"the kernels of {operation.name} are checked at its first call, which is in the "
            "capture of a CUDA graph here. Run the step once before the capture."
        )
    return failure(
        operation, entry, dtype, torch.device("cuda", torch.cuda.current_device())
    )


def check_widths(calls: Calls, device: torch.device) -> None:
    """Compare the kernels of this package in the widths of these calls; those that are wrong run no more in
    this process, for the dtype of the call."""
    for operation, dtype, last in calls:
        entry = next(
            (e for e in operation.implementations if e.name == KERNELS_OF_THIS_PACKAGE),
            None,
        )
        if entry is None or not operation.has(entry.name, "cuda", dtype):
            continue
        size = ROWS, _width(operation, dtype, last)
        arguments = _example(operation, *size, dtype, device)
        if _takes(entry, arguments) and failure(
            operation, entry, dtype, device, [size]
        ):
            operation.remove(entry.name, "cuda", dtype)


def _example(
    operation: Operation,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple:
    make = operation.make_example
    assert make is not None, "operations with kernels have examples"
    return make(rows, width, dtype, device)


def _width(operation: Operation, dtype: torch.dtype, last: int) -> int:
    """Width of the example whose first tensor has the last size `last`.

    That tensor may be two halves of the width.
    """
    first = _example(operation, 1, 8, dtype, torch.device("cpu"))[0]
    return last * 8 // first.shape[-1]


def _takes(entry: Implementation, arguments: tuple) -> bool:
    return entry.suits(*arguments) and not entry.fits(*arguments)


def failure(
    operation: Operation,
    entry: Implementation,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> str:
    """Compare an implementation with torch's operations: "" if it is right, else what is wrong, which is also
    logged with the kernels' names. Leaves the random numbers of the process as they are.

    sizes: (rows, width), of which the first is used that the implementation takes
    """
    launches: Launches = {}
    try:
        # inference_mode(False) turns gradients on, too.
        with (
            launches_recorded() as launches,
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            reason = _difference(operation, entry, dtype, device, sizes)
    except Exception as error:  # whatever it is: the run goes on without the kernels
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning(
            "%s %s failed the check on %s, so torch's operations compute %s there: %s",
            *_named(launches, entry),
            device,
            operation.name,
            reason,
        )
    return reason


def _difference(
    operation: Operation,
    entry: Implementation,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[tuple[int, int]],
) -> str:
    if operation.make_example is None:
        return "the operation has no example"
    for rows, width in sizes:
        if _takes(entry, operation.make_example(rows, width, dtype, device)):
            error = largest_error(operation, entry, rows, width, dtype, device)
            return (
                ""
                if error <= 1
                else (
                    f"{rows} rows of {width} elements of {dtype} are wrong by "
                    f"{error:.3g} times the tolerance"
                )
            )
    return "it takes no example"


def _named(launches: Launches, entry: Implementation) -> tuple[str, str]:
    """("kernels", "norm_forward, norm_backward (norm.cu)"); the implementation where nothing was launched."""
    kernels = dict.fromkeys(kernel for kernel, _ in launches)
    if not kernels:
        return "implementation", entry.name
    files = dict.fromkeys(kernel.file for kernel in kernels)
    return (
        "kernels",
        f"{', '.join(kernel.name for kernel in kernels)} ({', '.join(files)})",
    )


def _check_before_use(
    operation: Operation, entry: Implementation, dtype: torch.dtype
) -> str:
    return reason_against_implementation(operation, entry, dtype)


CHECKS_BEFORE_USE["cuda"] = _check_before_use
