"""The scan by flash-linear-attention: what its functions are called with, by functions of the same calls that compute
the recurrence. The package itself needs a GPU."""

import sys
from types import ModuleType

import pytest
import torch

from megatron_ds.extensions.mixers import fla_scan
from megatron_ds.extensions.mixers.linear_scan import linear_scan
from megatron_ds.ops.kernel_table import OPERATIONS
from tests.mixers.recurrences import recurrence
from tests.mixers.test_operations import DK, DV, HEADS, B, S, documents_of, inputs, near

pytestmark = pytest.mark.plan


def checked(q, k, v, g, beta=None, *, scale=None, initial_state=None):
    """A function of the package, token by token."""
    assert q.shape == k.shape == (B, S, HEADS, DK) and v.shape == (B, S, HEADS, DV)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert (
        g.shape == (B, S, HEADS) and g.dtype == torch.float32 and initial_state is None
    )
    scale = DK**-0.5 if scale is None else scale
    wide = [t if t is None else t.double().transpose(0, 1) for t in (q, k, v, g, beta)]
    out = recurrence(scale * wide[0], *wide[1:])
    return out.transpose(0, 1).to(q.dtype), None


@pytest.fixture
def fla(monkeypatch):
    """The package, with one function of each kind."""
    for module, name in (fla_scan.DELTA_RULE, fla_scan.STATE_SPACE):
        made = ModuleType(module)
        setattr(made, name, checked)
        monkeypatch.setitem(sys.modules, module, made)
    for module in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))


@pytest.mark.parametrize("has_rule", (False, True), ids=("state space", "delta rule"))
def test_the_functions_of_the_package_compute_the_scan_and_its_gradients(fla, has_rule):
    assert fla_scan.reason_against() == ""
    given = inputs(has_rule)
    narrow = [t if t is None else t.bfloat16() for t in given[:3]]
    others = [t if t is None else t.clone() for t in given[3:]]
    gradients = []
    outputs = []
    for scan in (fla_scan.scan_by_fla, linear_scan.in_torch):
        leaves = [
            t if t is None else t.clone().requires_grad_() for t in (*narrow, *others)
        ]
        out = scan(*leaves)
        assert out.dtype == torch.bfloat16
        outputs.append(out.float())
        (out.float() ** 2).sum().backward()
        gradients.append([t.grad.float() for t in leaves if t is not None])
    assert near(outputs[0], outputs[1], 1e-2)
    for found, expected in zip(*gradients, strict=True):
        assert near(found, expected, 2e-2)


def test_values_of_32_bits_beside_narrow_keys_keep_their_dtype(fla):
    """Mamba-2 multiplies its values by fp32 steps."""
    q, k, v, decay, _ = inputs(False)
    out = fla_scan.scan_by_fla(q.bfloat16(), k.bfloat16(), v, decay)
    assert out.dtype == torch.float32
    assert near(out, linear_scan(q, k, v, decay), 2e-2)


def test_what_the_package_does_not_take_is_left_to_torch(fla):
    narrow = [t.bfloat16() for t in inputs(True)]
    reason = fla_scan.reason_against_arguments
    assert reason(*narrow) == ""
    assert reason(*inputs(True)) == "fp32"
    documents = documents_of((0, 3, S))
    assert reason(*narrow, documents) == "documents that are kept apart"


def test_it_runs_on_gpus_alone_and_where_it_can_be_imported(monkeypatch):
    names = [entry.name for entry in OPERATIONS["linear_scan"].implementations]
    assert names[-2:] == [fla_scan.NAME, "torch"]
    of_fla = OPERATIONS["linear_scan"].implementations[-2]
    assert of_fla.devices == ("cuda",)
    assert linear_scan.first_choice("cpu", torch.bfloat16) == "torch"
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "fla.ops.gated_delta_rule cannot be imported" in of_fla.available()
    # Another version.
    for module in ("fla", "fla.ops", fla_scan.DELTA_RULE[0]):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    assert "has no chunk_gated_delta_rule" in of_fla.available()
