"""The table of kernels chooses by device, dtype, availability and arguments."""

import logging

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.ops import kernel_table
from megatron_ds.ops.kernel_table import CPU, GPU, OPERATIONS, Operation, selected


@pytest.fixture
def operation():
    @Operation
    def twice(x, *, odd=False):
        """2 x."""
        return "torch"

    yield twice
    del OPERATIONS["twice"]


def test_torch_serves_what_no_implementation_takes(operation):
    operation.implementation("gpu", devices=GPU)(lambda x, **_: "gpu")
    operation.implementation("half", devices=CPU, dtypes=(torch.bfloat16,))(
        lambda x, **_: "half"
    )
    assert (
        operation(torch.ones(1)) == "torch"
        and operation(torch.ones(1).bfloat16()) == "half"
    )
    assert operation(torch.ones(1, device="meta")) == "gpu"  # planned as on a GPU


def test_the_first_registered_implementation_that_takes_the_arguments_runs(
    operation, caplog
):
    operation.implementation("first", fits=lambda x, odd=False: "odd" if odd else "")(
        lambda x, **_: "first"
    )
    operation.implementation("second", suits=lambda x, odd=False: len(x) > 1)(
        lambda x, **_: "second"
    )
    with caplog.at_level(logging.INFO):
        assert operation(torch.ones(1)) == "first"
        assert [operation(torch.ones(2), odd=True) for _ in range(2)] == ["second"] * 2
        assert operation(torch.ones(1), odd=True) == "torch"
    assert caplog.text.count("first does not take these arguments (odd)") == 1


def test_an_implementation_that_this_machine_lacks_is_passed_over_but_planned(
    operation,
):
    operation.implementation(
        "gpu", devices=("cpu", "meta"), available=lambda: "no GPU"
    )(lambda x: "gpu")
    assert (
        operation(torch.ones(1)) == "torch"
        and operation(torch.ones(1, device="meta")) == "gpu"
    )


def test_torch_alone_can_be_selected(operation):
    operation.implementation("fast")(lambda x: "fast")
    with selected("torch"):
        assert operation(torch.ones(1)) == "torch"
        assert operation.first_choice("cpu", torch.float32) == "torch"
    assert operation(torch.ones(1)) == "fast"
    assert operation.first_choice("cpu", torch.float32) == "fast"
    with pytest.raises(ConfigError, match="auto or torch"):
        kernel_table.select("cuda")
