"""The head and the loss by chunks of rows, against the whole head with whole logits."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.models import gpt_loss
from megatron_ds.models.heads import head_logits
from megatron_ds.mpu.group import coordinates_of, solo
from megatron_ds.ops.soft_cap import capped
from megatron_ds.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_ds.tensor_parallel.linear import column_linear, new_shard
from megatron_ds.tensor_parallel.logits_in_chunks import LogitsInChunks, suitable_chunks
from megatron_ds.tensor_parallel.vocabulary import vocabulary_spec
from tests.harness.alive_bytes import AliveBytes
from tests.harness.gradients import accumulated, install
from tests.harness.model_runs import context_of
from tests.harness.shards import cut
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

S, B, H, V = 6, 3, 5, 19
CHUNKS = [2, 4, 7, 18, 100]  # of 18 rows; 4 and 7 do not divide them


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LABELS = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
TABLE, BIAS, X, DLOSS = (
    randn(V, H, seed=2),
    randn(V, seed=3),
    randn(S, B, H, seed=4),
    randn(S, B, seed=5),
)


def make_weight(group, padded, dtype):
    spec = vocabulary_spec("output_layer.weight", V, H, 0.02, padded)
    weight = new_shard(spec, context_of(group, dtype=dtype))
    weight.data.copy_(cut(TABLE.to(dtype), weight.spec, coordinates_of(group)))
    return weight


def gradients(
    group,
    padded,
    chunks,
    *,
    sequence_parallel=False,
    bias=False,
    main_grad=False,
    smoothing=0.0,
    dtype=torch.float32,
    cap=None,
):
    """(loss, dx, dw, db or None) of a rank; chunks None: the whole head."""
    weight = make_weight(group, padded, dtype)
    if main_grad:
        weight.ready = 0
        completed = lambda: setattr(weight, "ready", weight.ready + 1)
        install(weight, torch.ones(weight.shape), completed)
    b = None
    if bias:
        b = torch.zeros(padded).index_copy(0, torch.arange(V), BIAS).to(dtype)
        b = b.chunk(group.size)[group.rank].clone().requires_grad_()
    x = (
        (X.chunk(group.size)[group.rank] if sequence_parallel else X)
        .to(dtype)
        .clone()
        .requires_grad_()
    )
    if chunks is None:
        logits = column_linear(x, weight, b, group, sequence_parallel)
        loss = vocab_parallel_cross_entropy(
            logits if cap is None else capped(logits, cap),
            LABELS,
            group,
            V,
            smoothing,
        )
    else:
        loss = LogitsInChunks(
            x, weight, b, group, sequence_parallel, chunks, cap
        ).cross_entropy(LABELS, V, smoothing)
    loss.backward(DLOSS)
    assert not main_grad or weight.ready == 1 and weight.grad is None
    return (
        loss.detach(),
        x.grad,
        accumulated(weight),
        b.grad if bias else None,
    )


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(
    "smoothing, bias, main_grad, cap",
    [
        (0.0, False, True, None),
        (0.1, True, False, 0.9),
        (0.1, False, True, None),
        (0.0, True, True, 0.9),
    ],
)
@pytest.mark.parametrize(
    "t, padded, sequence_parallel",
    [
        (1, 19, False),
        (1, 24, False),
        (2, 40, False),
        (2, 20, True),
        (3, 24, True),
        (3, 24, False),
    ],
)
def test_chunks_give_the_loss_and_gradients_of_the_whole_head(
    t, padded, sequence_parallel, smoothing, bias, main_grad, cap, chunks
):
    def main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        options = {
            "sequence_parallel": sequence_parallel,
            "bias": bias,
            "main_grad": main_grad,
            "smoothing": smoothing,
            "cap": cap,
        }
        return gradients(group, padded, chunks, **options), gradients(
            group, padded, None, **options
        )

    for got, expected in run_ranks(t, main):
        # Sums of the same terms in another order: a few roundings of fp32.
        for one, other in zip(got, expected):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_chunks_are_as_exact_as_the_whole_head(dtype, main_grad):
    """Both against float64. The products of chunks are rounded as those of the whole are; each chunk's weight
    gradient is rounded, if at all, before it is added in fp32."""
    run = lambda chunks: gradients(
        solo("tp"), 24, chunks, main_grad=main_grad, dtype=dtype, bias=True
    )
    x, w, b = (t.to(dtype).double().requires_grad_() for t in (X, TABLE, BIAS))
    logits = (x @ w.t() + b).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(
        logits, LABELS.flatten(), reduction="none"
    ).view(S, B)
    loss.backward(DLOSS.double())
    exact = (loss.detach(), x.grad, w.grad, b.grad)
    for one, whole, wanted in zip(run(4), run(None), exact):
        one, whole = (
            t.double()[tuple(map(slice, wanted.shape))]
            - main_grad * (t.shape == (24, H))
            for t in (one, whole)
        )
        error, usual = ((t - wanted).abs().max() for t in (one, whole))
        assert error <= 1.5 * usual + torch.finfo(dtype).eps * wanted.abs().max() / 2


def test_frozen_weights_and_frozen_inputs_get_no_gradient():
    for frozen in ("x", "weight"):
        weight, x = (
            make_weight(solo("tp"), 24, torch.float32),
            X.clone().requires_grad_(),
        )
        (x if frozen == "x" else weight).requires_grad_(False)
        LogitsInChunks(x, weight, None, solo("tp"), False, 4).cross_entropy(
            LABELS, V
        ).backward(DLOSS)
        assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (
            frozen == "weight"
        )


def test_all_chunks_talk_once_and_little():
    def main(rank, world):
        group = world.group("tp", (0, 1), rank)
        loss = LogitsInChunks(
            X.clone().requires_grad_(),
            make_weight(group, 24, torch.float32),
            None,
            group,
            False,
            6,
        ).cross_entropy(LABELS, V)
        forward = dict(world.traffic[rank].calls)
        loss.backward(DLOSS)
        return forward, dict(world.traffic[rank].calls)

    forward, both = run_ranks(2, main)[0]
    assert forward == {("all_gather", "tp", 2): 1}
    assert both == forward | {("all_reduce", "tp", 2): 1}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("chunks", [4, 8])
def test_the_memory_is_that_of_one_chunk_of_logits(chunks, device):
    s, h, v = 512, 16, 2048
    x = torch.zeros(s, 1, h, device=device, requires_grad=True)
    weight = torch.zeros(v, h, device=device, requires_grad=True)
    install(weight, torch.zeros(v, h, device=device))
    labels = torch.zeros(s, 1, dtype=torch.int64, device=device)
    logits = s * v * 4
    with AliveBytes(peak=True) as alive:
        loss = (
            LogitsInChunks(x, weight, None, solo("tp"), False, chunks)
            .cross_entropy(labels, v)
            .sum()
        )
        assert alive.now() <= s * 12 + 4  # between forward and backward
        loss.backward()
    blocks = 3 * 2**20 * (device == "cpu")  # of torch's operations on some rows
    assert logits / chunks < alive.peak < 1.05 * logits / chunks + blocks + 100 * s


def test_evaluation_keeps_nothing_and_the_loss_is_the_whole_heads():
    weight = make_weight(solo("tp"), 24, torch.float32)
    batch = Batch(
        LABELS.t(),
        LABELS.t(),
        torch.ones(B, S),
        torch.arange(S).expand(B, S),
        sample_ids=tuple(range(B)),
        training=False,
    )
    with torch.no_grad():
        losses = [
            gpt_loss(logits, batch, tp=solo("tp"), vocab_size=V, label_smoothing=0.1)
            for logits in (
                LogitsInChunks(X, weight, None, solo("tp"), False, 3),
                column_linear(X, weight, None, solo("tp")),
            )
        ]
    torch.testing.assert_close(
        losses[0].objective, losses[1].objective, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_masks_that_leave_chunks_few_tokens_or_none_do_not_move_the_loss(per_token):
    """Of three chunks of 6 tokens, 1, 0 and 5 count."""
    mask = torch.zeros(S * B)
    mask[torch.tensor([3, 12, 13, 14, 16, 17])] = 1.0
    batch = Batch(
        LABELS.t(),
        LABELS.t(),
        mask.view(S, B).t(),
        torch.arange(S).expand(B, S),
        sample_ids=tuple(range(B)),
    )
    results = []
    for chunks in (None, 3):
        weight, x = (
            make_weight(solo("tp"), 24, torch.float32),
            X.clone().requires_grad_(),
        )
        logits = (
            column_linear(x, weight, None, solo("tp"))
            if chunks is None
            else LogitsInChunks(x, weight, None, solo("tp"), False, chunks)
        )
        loss = gpt_loss(logits, batch, tp=solo("tp"), vocab_size=V, per_token=per_token)
        loss.objective.backward()
        results.append(
            (loss.objective.detach(), loss.total, loss.tokens, x.grad, weight.grad)
        )
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    counted = vocab_parallel_cross_entropy(
        column_linear(X, weight, None, solo("tp")), LABELS, solo("tp"), V
    )
    parts = [
        (loss * m).sum() / m.sum().clamp(min=1)
        for loss, m in zip(counted.view(3, 6), mask.view(3, 6))
    ]
    assert (
        abs(torch.stack(parts).mean() - results[0][0]) > 1e-2
    )  # what a mean of means would give


def test_suitable_chunks_have_logits_of_the_size_of_the_hidden_states():
    assert (
        suitable_chunks(rows=65536, hidden=4096, columns=128256) == 32
    )  # of 2,092 rows
    assert suitable_chunks(65536, 384, 8192) == 22  # 3,072
    assert suitable_chunks(1 << 20, 4096, 8192) == 256  # 4,096, the most
    assert suitable_chunks(1024, 64, 128256) == 4  # 256, the fewest
    assert suitable_chunks(200, 64, 128256) == 1 and suitable_chunks(0, 64, 8) == 1
    x, weight, ctx = (
        torch.zeros(300, 2, 8),
        torch.zeros(64, 8),
        replace(context_of(), logit_chunks=0),
    )
    assert head_logits(x, weight, None, ctx).chunks == 3  # of 256 rows
    assert isinstance(head_logits(x[:128], weight, None, ctx), torch.Tensor)
