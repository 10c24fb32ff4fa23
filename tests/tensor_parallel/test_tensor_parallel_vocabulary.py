"""Embedding, logits and cross entropy split over the vocabulary, against torch's on the whole one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_ds.mpu.group import coordinates_of, solo
from megatron_ds.ops import kept_probabilities
from megatron_ds.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_ds.tensor_parallel.vocabulary import (
    VocabParallelEmbedding,
    parallel_logits,
    vocabulary_spec,
)
from tests.harness.alive_bytes import AliveBytes
from tests.harness.gradients import accumulated, install
from tests.harness.model_runs import context_of
from tests.harness.shards import assemble, cut
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

S, B, H, V = 6, 3, 5, 19
LAYOUTS = [
    (1, 19),
    (1, 24),
    (2, 20),
    (2, 40),
    (3, 24),
    (4, 24),
]  # (2, 40): the last rank holds padding only


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TOKENS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
TABLE, DX = randn(V, H, seed=2), randn(S, B, H, seed=3)


def make_embedding(group, padded, **options):
    spec = vocabulary_spec("embedding.word_embeddings.weight", V, H, 0.02, padded)
    layer = VocabParallelEmbedding(spec, context_of(group, **options))
    layer.weight.data.copy_(cut(TABLE, layer.weight.spec, coordinates_of(group)))
    return layer


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "t, padded", [layout for layout in LAYOUTS if S % layout[0] == 0]
)
def test_embedding_equals_torch(t, padded, sequence_parallel, main_grad):
    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        layer = make_embedding(group, padded, sequence_parallel=sequence_parallel)
        ready = []
        if main_grad:
            total = torch.ones_like(layer.weight)
            install(layer.weight, total, lambda: ready.append(1))
        x = layer(TOKENS)
        x.backward(DX.chunk(t)[rank] if sequence_parallel else DX)
        assert ready == [1] * main_grad and (layer.weight.grad is None) == main_grad
        gradient = accumulated(layer.weight) - float(main_grad)
        return x.detach(), gradient, layer.weight.spec

    xs, gradients, specs = zip(*run_ranks(t, rank_main))
    table = TABLE.clone().requires_grad_()
    plain = F.embedding(TOKENS, table).transpose(0, 1)
    plain.backward(DX)
    assert torch.equal(torch.cat(xs) if sequence_parallel else xs[0], plain)
    torch.testing.assert_close(assemble(list(gradients), specs[0]), table.grad)
    assert (
        sum(g.count_nonzero() for g in gradients) == table.grad.count_nonzero()
    )  # none on padding


def test_bf16_embedding_gradients_add_up_in_fp32():
    layer = make_embedding(solo("tp"), 24, dtype=torch.bfloat16)
    install(layer.weight, torch.zeros(24, H))
    dy = randn(300, 1, H, seed=4).bfloat16()
    layer(torch.zeros(1, 300, dtype=torch.int64)).backward(dy)
    torch.testing.assert_close(accumulated(layer.weight)[0], dy.float().sum((0, 1)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "t, sequence_parallel", [(1, False), (2, False), (2, True), (3, True)]
)
def test_tied_embedding_and_logits_add_to_one_main_grad(
    t, sequence_parallel, recompute
):
    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        layer = make_embedding(group, 24, sequence_parallel=sequence_parallel)
        ready = []
        total = torch.zeros_like(layer.weight)
        install(layer.weight, total, lambda: ready.append(1))

        def run(tokens):
            logits = parallel_logits(
                layer(tokens).tanh(), layer.weight, group, sequence_parallel
            )
            return vocab_parallel_cross_entropy(logits, LABELS, group, V)

        loss = (
            checkpoint(run, TOKENS, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else run(TOKENS)
        )
        loss.backward(torch.ones_like(loss))
        assert len(ready) == 2
        return loss.detach(), accumulated(layer.weight), layer.weight.spec

    losses, gradients, specs = zip(*run_ranks(t, rank_main))
    table = TABLE.clone().requires_grad_()
    logits = F.embedding(TOKENS, table).transpose(0, 1).tanh() @ table.t()
    plain = F.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    ).view(S, B)
    plain.backward(torch.ones_like(plain))
    for loss in losses:
        torch.testing.assert_close(loss, plain.detach())
    torch.testing.assert_close(
        assemble(list(gradients), specs[0]), table.grad, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("scale", [1.0, 100.0])  # 100: most probabilities underflow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("t, padded", LAYOUTS)
def test_cross_entropy_equals_torch_on_the_true_vocabulary(t, padded, smoothing, scale):
    whole = torch.full(
        (S, B, padded), 1e4
    )  # padded columns hold rubbish, larger than any logit
    whole[..., :V] = scale * randn(S, B, V, seed=5)
    dloss = randn(S, B, seed=6)

    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        logits = whole.chunk(t, dim=-1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, LABELS, group, V, smoothing)
        loss.backward(dloss)
        return loss.detach(), logits.grad

    losses, gradients = zip(*run_ranks(t, rank_main))
    logits = whole[..., :V].clone().requires_grad_()
    plain = F.cross_entropy(
        logits.flatten(0, 1),
        LABELS.flatten(),
        reduction="none",
        # torch's definition of smoothing
        label_smoothing=smoothing * V / (V - 1),
    ).view(S, B)
    plain.backward(dloss)
    for loss in losses:
        assert torch.equal(loss, losses[0])
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=1e-5 * scale)
    gradient = torch.cat(gradients, dim=-1)
    torch.testing.assert_close(gradient[..., :V], logits.grad, rtol=1e-5, atol=1e-6)
    assert gradient[..., V:].count_nonzero() == 0


@pytest.mark.parametrize("rows", [1, 4, 1000])  # worked on at once
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t, padded", LAYOUTS)
def test_cross_entropy_of_16_bit_logits_is_computed_in_fp32(
    t, padded, dtype, smoothing, rows, monkeypatch
):
    monkeypatch.setattr(kept_probabilities, "CPU_BLOCK", rows * padded // t)
    whole = torch.full((S, B, padded), 100.0, dtype=dtype)
    whole[..., :V] = (3 * randn(S, B, V, seed=5)).to(dtype)
    dloss = randn(S, B, seed=6)

    def rank_main(rank, world):
        logits = whole.chunk(t, dim=-1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            logits, LABELS, world.group("tp", tuple(range(t)), rank), V, smoothing
        )
        loss.backward(dloss)
        return loss.detach(), logits.grad

    losses, gradients = zip(*run_ranks(t, rank_main))
    wide = whole[..., :V].float().requires_grad_()
    plain = F.cross_entropy(
        wide.flatten(0, 1),
        LABELS.flatten(),
        reduction="none",
        label_smoothing=smoothing * V / (V - 1),
    ).view(S, B)
    plain.backward(dloss)
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0], plain.detach())
    gradient = torch.cat(gradients, dim=-1)
    assert gradient.dtype == dtype and gradient[..., V:].count_nonzero() == 0
    # Probabilities and the gradient are rounded, and with smoothing the difference of what was rounded is
    # taken.
    least = smoothing / V * torch.finfo(dtype).eps
    torch.testing.assert_close(
        gradient[..., :V].float(),
        wide.grad,
        rtol=torch.finfo(dtype).eps,
        atol=1e-7 + least,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_logits_are_as_exact_where_the_label_is_certain_and_where_tokens_are_unlikely(
    dtype,
):
    whole = torch.zeros(1, 1, V, dtype=dtype)
    whole[..., 3], whole[..., 7] = (
        8.0,
        -10.0,
    )  # p = 1 - 0.0040 and 1.5e-8: neither is a number of 16 bits
    logits, labels = whole.clone().requires_grad_(), torch.tensor([[3]])
    vocab_parallel_cross_entropy(logits, labels, solo("tp"), V).backward(
        torch.full((1, 1), 2.0**16)
    )
    exact = (whole.double().softmax(-1) - F.one_hot(labels, V)) * 2.0**16
    torch.testing.assert_close(
        logits.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=0
    )


def test_cross_entropy_talks_once_and_little():
    def rank_main(rank, world):
        group = world.group("tp", (0, 1), rank)
        logits = randn(S, B, 10, seed=rank).requires_grad_()
        vocab_parallel_cross_entropy(logits, LABELS, group, V).sum().backward()
        return dict(world.traffic[rank].calls), dict(world.traffic[rank].bytes)

    calls, count = run_ranks(2, rank_main)[0]
    assert calls == {("all_gather", "tp", 2): 1}
    assert count == {
        ("all_gather", "tp", 2): 2 * 2 * S * B * 4
    }  # two ranks, two numbers a token


def test_cross_entropy_keeps_one_buffer_of_the_size_of_the_logits():
    logits = randn(S, B, V, seed=5).requires_grad_()
    with AliveBytes() as alive:
        loss = vocab_parallel_cross_entropy(logits, LABELS, solo("tp"), V).sum()
    assert alive.now() <= 17 * S * B + 4  # besides it, numbers per token
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.numel() == S * B * V
    with pytest.raises(AssertionError, match="run the forward again"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_become_probabilities_and_gradient_where_they_lie(dtype, monkeypatch):
    monkeypatch.setattr(kept_probabilities, "CPU_BLOCK", 4 * 512)
    logits = randn(128, 2, 512, seed=5).to(dtype).requires_grad_()
    labels = torch.zeros(128, 2, dtype=torch.int64)
    with AliveBytes(peak=True) as alive:
        vocab_parallel_cross_entropy(logits, labels, solo("tp"), 512).sum().backward()
    few_rows, numbers_of_a_token = 3 * 4 * 512 * 4, 12 * 4
    assert alive.peak < few_rows + 256 * numbers_of_a_token < logits.nbytes / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_takes_logits_that_lie_anyhow_and_gives_a_loss_of_its_own(dtype):
    logits, labels = randn(B, S, V, seed=5).to(dtype), LABELS
    losses = [
        vocab_parallel_cross_entropy(x.requires_grad_(), labels, solo("tp"), V)
        for x in (logits.clone().transpose(0, 1), logits.transpose(0, 1).contiguous())
    ]
    torch.testing.assert_close(*losses)
    losses[0].mul_(2)  # in place: it is no view of anything
    with pytest.raises(AssertionError):
        vocab_parallel_cross_entropy(
            logits, labels, solo("tp"), V
        )  # labels [s, b] of logits [b, s, V]


def test_second_derivatives_are_refused_not_wrong():
    logits = randn(S, B, V, seed=5).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, LABELS, solo("tp"), V).square().sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_certain_prediction_costs_nothing_and_a_wrong_one_its_logit():
    logits = torch.zeros(1, 2, V)
    logits[..., 4] = 500.0
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[4, 7]]), solo("tp"), V)
    assert loss.tolist() == [[0.0, 500.0]]
