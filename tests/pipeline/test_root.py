"""A backward from a `Root` beside torch's from tensors and gradients."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from megatron_ds.pipeline.backward import Root, backward_from
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan

FIRST_BACKWARD = """
import sys, torch
from megatron_ds.pipeline.backward import Root
x = torch.ones(2, requires_grad=True)
root = Root(x * 3)
root.give(torch.ones(2))
torch.autograd.backward(root.edge)
assert x.grad.tolist() == [3, 3]
assert "sympy" not in sys.modules, "sympy was loaded"
"""


def _graph():
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    return x, [x.sin(), x.cos() * x[0]]


def test_a_root_hands_the_given_gradients_to_its_tensors():
    given = [
        torch.full((2, 3), 0.3, dtype=torch.float64),
        torch.full((2, 3), -7.0, dtype=torch.float64),
    ]
    x, outputs = _graph()
    torch.autograd.backward(outputs, given)
    y, outputs = _graph()
    root = Root(*outputs)
    root.give(*given)
    torch.autograd.backward(root.edge)
    assert torch.equal(x.grad, y.grad)
    z, outputs = _graph()
    root = Root(*outputs)
    root.give(*given)
    [found] = torch.autograd.grad(root.edge, [z])
    assert torch.equal(x.grad, found)


def test_a_root_without_gradients_is_an_error():
    _, outputs = _graph()
    with pytest.raises(RuntimeError, match="returned an incorrect number of gradients"):
        torch.autograd.backward(Root(*outputs).edge)


def test_a_root_keeps_no_tensor_alive_and_makes_no_cycle():
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        y = x + 1  # saves nothing for its backward
        root, gone = Root(y), weakref.ref(y)
        del y
        assert gone() is None
        gone = weakref.ref(root)
        del root
        assert gone() is None
    finally:
        gc.enable()


def test_leaves_accumulate_in_their_order_even_where_gradients_are_switched_off():
    seen, leaves = [], [torch.zeros(2, requires_grad=True) for _ in range(3)]
    for n, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n))
    with torch.no_grad():
        backward_from(leaves, [torch.full((2,), float(n)) for n in range(3)])
    assert seen == [0, 1, 2] and [leaf.grad[0].item() for leaf in leaves] == [0, 1, 2]


def test_the_first_backward_of_a_process_does_not_load_a_second_of_modules():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_BACKWARD],
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr
