"""A fixture that runs tests of compiled attention with each instruction set of this processor in turn."""

import pytest

from megatron_ds.extensions.kernels.cpu import compiled_attention

SETS = (
    compiled_attention.extension().instruction_sets()
    if compiled_attention.extension()
    else []
)


@pytest.fixture(autouse=True, params=SETS or ["none"])
def instruction_set(request, monkeypatch):
    """Skips tests of a dtype that the set does not have; without a dtype they are of fp32."""
    name, dtype = request.param, request.node.callspec.params.get("dtype")
    if name not in SETS:
        return
    found = getattr(compiled_attention.extension(), name)
    if not hasattr(found, f"forward_{compiled_attention.NAMES.get(dtype, 'fp32')}"):
        pytest.skip(f"no {dtype} with {name}")
    monkeypatch.setattr(compiled_attention, "functions", lambda dtype: found)
