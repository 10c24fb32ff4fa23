"""Wrappers of kernels neither allocate page-locked memory nor read the host's copy of a value of the device: a
CUDA graph could capture none of both, and the host would wait for the GPU within a block.
"""

import ast
from pathlib import Path

import pytest
import torch

from megatron_ds.host.dispatch_mode import DispatchMode
from tests.harness.host_blocks import STYLES, gpu_path, own_blocks
from tests.harness.syntax import tree_of

pytestmark = pytest.mark.plan

FOLDER = Path(__file__).parents[2] / "megatron_ds/extensions/kernels/gpu"
OF_THE_UPDATE = {"adam_kernels.py"}  # whose table of addresses is copied once a step
WRAPPERS = [
    path
    for path in (
        *sorted(FOLDER.glob("*_kernels.py")),
        FOLDER / "gpu_kernel.py",
        FOLDER / "packets.py",
    )
    if path.name not in OF_THE_UPDATE
]
FORBIDDEN = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "synchronize"),
    *("pin_memory", "on_device", "is_pinned"),
}
aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero}
PINS = {aten._pin_memory, aten.is_pinned}


def forbidden_in(tree):
    """(line, name) of calls and keywords that wait for a device or lock pages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            yield node.lineno, node.attr
        if isinstance(node, ast.Name) and node.id in FORBIDDEN:
            yield node.lineno, node.id
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN:
            yield node.value.lineno, node.arg


@pytest.mark.parametrize("path", WRAPPERS, ids=lambda path: path.name)
def test_wrappers_neither_wait_nor_lock_pages(path):
    assert list(forbidden_in(tree_of(path))) == []


@pytest.mark.parametrize(
    "line", ["x.item()", "torch.empty(3, pin_memory=True)", "on_device(x, device)"]
)
def test_what_waits_or_locks_pages_is_found(line):
    assert len(list(forbidden_in(ast.parse(line)))) == 1


class Waits(DispatchMode):
    """Operations of a run that a graph cannot capture."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in READS | PINS:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("style", STYLES)
def test_a_block_reads_no_value_on_the_host(style):
    with gpu_path():
        run = own_blocks(style, 1, more="--kernels auto")
        run()
        with Waits() as waits:
            run()
    assert waits.found == []


def test_a_read_is_found():
    with Waits() as waits:
        torch.ones(()).item()
    assert len(waits.found) == 1
