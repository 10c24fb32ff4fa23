"""Saves in the background, pairs of answers and generation on a GPU that does not exist: uses of memory are ordered,
the results are those of the CPU, and the host waits as rarely as it may."""

from contextlib import contextmanager

import pytest
import torch

from tests.harness.fake_cuda import CUDA, FakeGpu, fake_cuda
from tests.harness.gpu_features import (
    NEW_TOKENS,
    PROMPTS,
    generated,
    saved_files,
    trained_on_pairs,
)

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2, together=True)]

CPU = torch.device("cpu")
BY_TORCH = ("--kernels", "torch")


@contextmanager
def fake_device():
    with fake_cuda(), FakeGpu() as gpu:
        yield gpu
    assert gpu.order.launches and not gpu.order.problems


def test_a_save_in_the_background_of_a_training_has_the_bytes_of_a_save(tmp_path):
    """A step is trained while it is written: the copies wait for the step before, and the update for the copies."""
    with fake_device():
        now = saved_files(CUDA, tmp_path / "now", *BY_TORCH, in_background=False)
    with fake_device() as gpu:
        later = saved_files(CUDA, tmp_path / "later", *BY_TORCH, in_background=True)
    assert now and later == now
    assert any("state_copies.py" in block.place for block in gpu.page_locked)


def test_pairs_train_like_on_the_cpu(tmp_path):
    with fake_device():
        (trace, _), reference = trained_on_pairs(CUDA, tmp_path, *BY_TORCH)
    (trace0, _), reference0 = trained_on_pairs(CPU, tmp_path)
    assert trace.losses == pytest.approx(trace0.losses, rel=1e-5)
    for found, expected in zip(reference, reference0):
        assert found == pytest.approx(expected, rel=1e-4)


def test_texts_are_those_of_the_cpu_with_one_wait_a_token():
    with fake_device() as gpu:
        found = generated(CUDA, *BY_TORCH)
    expected = generated(CPU)
    assert len(found) == len(PROMPTS)
    for number, tokens in expected.items():
        assert len(tokens) == NEW_TOKENS + number
        assert [t.token for t in found[number]] == [t.token for t in tokens]
        assert [t.log_prob for t in found[number]] == pytest.approx(
            [t.log_prob for t in tokens], rel=1e-4
        )
    steps = max(len(tokens) for tokens in expected.values()) + NEW_TOKENS
    waits = [place for place in gpu.order.waits if "generation" in place]
    assert 0 < len(waits) <= steps, waits
