"""--embed-layernorm: the norm of BLOOM's word embeddings, on any layout."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.batch.batch import Batch
from megatron_ds.config.options.model import ModelConfig
from megatron_ds.models import MODELS
from megatron_ds.models.embedding import rounded
from megatron_ds.mpu.context import ParallelContext
from tests.harness.pretraining import MOCK, losses, train

pytestmark = pytest.mark.processes

MODEL = dict(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=7,
    vocab_size=11,
    hidden_dropout=0.0,
    make_vocab_size_divisible_by=1,
)


@pytest.mark.parametrize("positions", ["learned_absolute", "alibi"])
def test_words_are_normalized_before_positions_are_added(positions):
    config = ModelConfig(
        **MODEL, position_embedding_type=positions, embed_layernorm=True
    )
    embedding = MODELS["gpt"](config, ParallelContext(device=torch.device("cpu")))[
        0
    ].make()
    parameters = dict(embedding.named_parameters())
    for number, name in enumerate(sorted(parameters)):
        torch.manual_seed(number)
        parameters[name].data.normal_()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    batch = Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(1, 7),
        position_ids=torch.arange(7).expand(1, 7),
        sample_ids=torch.arange(1),
    )
    words = parameters["word_embeddings.weight"][tokens]
    expected = F.layer_norm(
        words, (16,), parameters["norm.weight"], parameters["norm.bias"], 1e-5
    )
    if positions == "learned_absolute":
        expected = expected + parameters["position_embeddings.weight"]
    torch.testing.assert_close(embedding(None, batch), expected.transpose(0, 1))


@pytest.mark.quick
@pytest.mark.parametrize(
    "layout", ["--zero-stage 3", "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_losses_are_those_of_one_rank(tmp_path, layout):
    words = [
        *MOCK,
        *"--embed-layernorm --hidden-dropout 0 --attention-dropout 0".split(),
    ]
    for name, ranks, more in (
        ("one", 1, []),
        ("two", 2, layout.split()),
        ("plain", 1, []),
    ):
        kept = [
            word for word in words if name != "plain" or word != "--embed-layernorm"
        ]
        train(
            ranks,
            [*kept, *more, "--metrics-jsonl", str(tmp_path / name / "metrics.jsonl")],
        )
    one, two, plain = (losses(tmp_path / name) for name in ("one", "two", "plain"))
    assert two == pytest.approx(one, rel=1e-5) and plain != pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_factor_of_embeddings_is_a_number_of_the_dtype(dtype):
    for value in (1.0, 1152**0.5, 48.0, 0.3, 1e-3):
        assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()
    assert rounded(1152**0.5, torch.bfloat16) == 34
