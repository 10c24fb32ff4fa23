"""Every implementation of every operation against torch's operations in double precision, on odd sizes.

Implementations for GPUs run in the emulator.
"""

import importlib
import pkgutil

import pytest
import torch

import megatron_ds.ops
from megatron_ds.extensions.kernels.gpu.kernel_check import TOLERANCES, largest_error
from megatron_ds.ops import widened_products
from megatron_ds.ops.kernel_table import GPU, OPERATIONS, load_kernels, selected
from tests.harness.emulated import compile_together, emulated_gpu

pytestmark = pytest.mark.one_in(4)

for _module in pkgutil.iter_modules(megatron_ds.ops.__path__):
    importlib.import_module(f"megatron_ds.ops.{_module.name}")
load_kernels()

# torch's own layer_norm sums gradients of weights in 16 bits on a CPU: it may be four tolerances off.
SIZES = ((1, 8), (7, 24), (130, 40), (3, 1000))
# Of implementations that take no others, and need the processor's products of 16 bits.
# Products of 16-bit factors are rounded to their dtype before they are added.
LIMITS = {
    ("add_product_", "whole"): TOLERANCES[torch.bfloat16] / TOLERANCES[torch.float32]
}
OWN_SIZES = {
    ("attention", "c++"): ((65, 32), (130, 64), (7, 128)),
    ("affine", "one row"): ((1, 8), (1, 1001)),
    **{
        (name, "c++"): ((64, 64), (101, 99), (150, 1101), (260, 1000))
        for name in ("product", "affine", "add_product_")
    },
}
# An example is plain causal attention, which these do not take: tests/ops/test_windows.py compares the
# first with an explicit softmax in double precision. Kernels of Triton do not run in the emulator:
# test_flex_attention.py of tests/ops and of tests/gpu. Dropout by rows: tests/ops/test_attention_rows.py. Values of
# another width than keys: tests/ops/test_value_widths.py. torch's sums in fp32 exist on GPUs alone:
# tests/ops/test_fp32_sums.py.
OTHER_CASES = {
    ("attention", "flex"),
    ("attention", "rows"),
    ("attention", "padded"),
    ("add_product_", "fp32 sums"),
}
ENTRIES = [
    pytest.param(operation, entry, id=f"{operation.name}-{entry.name}")
    for operation in OPERATIONS.values()
    for entry in operation.implementations
    if (operation.name, entry.name) not in OTHER_CASES
    # with --kernels torch the whole product of GPUs also has the name of torch
    and (entry.name != "torch" or entry.function is operation.in_torch)
]


@pytest.mark.parametrize("operation, entry", ENTRIES)
def test_an_implementation_equals_torchs_operations_in_double_precision(
    operation, entry, monkeypatch
):
    sizes = OWN_SIZES.get((operation.name, entry.name))
    if sizes is None:
        monkeypatch.setattr(
            widened_products, "has_products", lambda dtype: dtype == torch.float32
        )
    assert operation.make_example, f"{operation.name} has no example"
    if entry.devices != GPU and entry.available():
        pytest.skip(entry.available())
    cases = [
        (rows, width, dtype, torch.device("cpu"))
        for dtype in entry.dtypes or TOLERANCES
        for rows, width in sizes or SIZES
    ]
    taken = [case for case in cases if takes(entry, operation.make_example(*case))]
    assert taken, "no size of the test is taken"
    with selected("auto"):
        compile_together(
            lambda: [largest_error(operation, entry, *case) for case in taken]
        )
        for case in taken:
            with emulated_gpu(seed=case[0]):
                error = largest_error(operation, entry, *case)
            limit = LIMITS.get((operation.name, entry.name), 1)
            limit = 4 if entry.name == "torch" else limit
            assert error <= limit, f"{case}: {error} times the tolerance"


def takes(entry, arguments):
    return entry.suits(*arguments) and not entry.fits(*arguments)


def test_a_wrong_implementation_is_found():
    operation = OPERATIONS["swiglu"]
    wrong = type(operation.implementations[0])(
        "wrong", lambda x: operation.in_torch(x) * 1.02
    )
    for dtype in TOLERANCES:
        assert largest_error(operation, wrong, 7, 24, dtype, torch.device("cpu")) > 1
