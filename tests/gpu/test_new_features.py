"""One GPU: saves in the background, pairs of answers and generated texts are those of a save, and of the CPU."""

import pytest
import torch

from tests.harness.gpu_features import generated, saved_files, trained_on_pairs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: torch.cuda.is_available() is False",
)
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def whole_products(monkeypatch):
    """fp32 products in fp32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def test_a_save_in_the_background_of_a_training_has_the_bytes_of_a_save(tmp_path):
    now = saved_files(CUDA, tmp_path / "now", in_background=False)
    for number in range(3):
        folder = tmp_path / f"later{number}"
        assert saved_files(CUDA, folder, in_background=True) == now and now


def test_pairs_train_like_on_the_cpu(tmp_path):
    (trace, _), reference = trained_on_pairs(CUDA, tmp_path)
    (trace0, _), reference0 = trained_on_pairs(CPU, tmp_path)
    assert trace.losses == pytest.approx(trace0.losses, rel=1e-3)
    for found, expected in zip(reference, reference0):
        assert found == pytest.approx(expected, rel=1e-4)


def test_texts_are_those_of_the_cpu():
    """At each token the GPU has another order of sums; the first steps are alike in any case."""
    found = generated(CUDA)
    for number, tokens in generated(CPU).items():
        assert len(found[number]) == len(tokens)
        first, expected = found[number][0], tokens[0]
        assert first.token == expected.token
        assert first.log_prob == pytest.approx(expected.log_prob, rel=1e-4)
