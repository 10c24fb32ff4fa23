"""A compilation is a phase of its own, in which a rank may take long; behind it the rank trains again."""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu.compile_phase import mark_compilations
from megatron_ds.host import places
from megatron_ds.host.place_file import PlaceWriter, read_places

pytestmark = pytest.mark.plan


def test_the_phase_of_a_compilation_ends_with_it(tmp_path, monkeypatch):
    from torch._dynamo.callback import callback_handler

    writer = PlaceWriter(tmp_path / "p", {})
    writer.step(3)
    monkeypatch.setattr(places, "_writer", [writer])
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    mark_compilations.cache_clear()
    mark_compilations()
    phases = []

    def backend(graph, inputs):
        phases.append(read_places(tmp_path / "p").places[-1].phase)
        return graph.forward

    compiled = torch.compile(lambda x: x * 3 + 1, backend=backend)
    for length in (3, 5):  # another length is another compilation
        assert torch.equal(compiled(torch.ones(length)), torch.full((length,), 4.0))
        phases.append(read_places(tmp_path / "p").places[-1].phase)
    mark_compilations.cache_clear()
    assert phases == [places.COMPILING, places.TRAINING] * 2
