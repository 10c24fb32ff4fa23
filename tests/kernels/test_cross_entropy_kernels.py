"""Cross entropy kernels against float64, with columns on one rank and on several."""

import threading
from dataclasses import replace

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import cross_entropy_kernels as kernels
from megatron_ds.extensions.kernels.gpu.self_check import failure
from megatron_ds.mpu.group import solo
from megatron_ds.ops import logits as logits_operations
from megatron_ds.ops.kernel_table import OPERATIONS
from megatron_ds.ops.logits import LogitsKept
from megatron_ds.tensor_parallel import cross_entropy
from megatron_ds.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.harness.alive_bytes import AliveBytes
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu
from tests.harness.threads import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# fp16 gradients are multiples of 2^-24: as in training, the loss is scaled.
SCALES = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 2.0**15}
# Ranks, true vocabulary, columns of a rank. A thread takes 4 or 8 columns at once, of long rows 8 or 16.
SHAPES = [
    (1, 1, 1),
    (1, 5, 7),
    (1, 264, 264),
    (1, 1000, 1003),
    (1, 4611, 4613),
    (1, 9000, 9000),
    (2, 1999, 1000),
    (3, 2500, 835),
    (2, 300, 304),
    (4, 17, 8),
]


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_compiled():
    def launch_all():
        for dtype in DTYPES:
            logits, labels = (
                torch.zeros(1, 8, dtype=dtype),
                torch.zeros(1, dtype=torch.int64),
            )
            (lse, _) = kernels.cross_entropy_facts(logits, labels, 8, False)
            kernels.cross_entropy_gradient_(
                logits, labels, lse, torch.ones(1), 8, 1.0, 0.0
            )

    compile_together(launch_all)


@pytest.fixture
def on_gpu(monkeypatch):
    """Gives what `emulated_gpu` gives; vocabulary-parallel cross entropy runs its kernels, also on several
    threads, of which one at a time launches."""

    def start(seed=0):
        gpu = context.append(emulated_gpu(seed)) or context[-1].__enter__()
        launch, one_at_a_time = gpu.launch, threading.Lock()

        def locked(*arguments):
            with one_at_a_time:
                launch(*arguments)

        gpu.launch = locked
        return gpu

    context = []
    monkeypatch.setattr(cross_entropy, "keep_logits", LogitsKept)
    for name in ("cross_entropy_facts", "cross_entropy_gradient_"):
        monkeypatch.setattr(logits_operations, name, getattr(kernels, name))
    yield start
    for entered in reversed(context):
        entered.__exit__(None, None, None)


def sample(ranks, vocab, width, dtype, rows=7, seed=0):
    """(logits [rows, 1, ranks * width] with rubbish in padding, labels [rows, 1], dloss fp32)."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.full((rows, 1, ranks * width), 1e4, dtype=dtype)
    whole[..., :vocab] = (3 * torch.randn(rows, 1, vocab, generator=g)).to(dtype)
    labels = torch.randint(0, vocab, (rows, 1), generator=g)
    labels[0], labels[-1] = 0, vocab - 1
    return whole, labels, (0.5 + torch.rand(rows, 1, generator=g)) * SCALES[dtype]


def exact(whole, labels, dloss, vocab, smoothing):
    """Loss and gradient in float64, by the definition of smoothing."""
    x = whole[..., :vocab].double().requires_grad_()
    target = torch.full_like(x, smoothing / max(vocab - 1, 1)).detach()
    target.scatter_(-1, labels.unsqueeze(-1), 1 - smoothing)
    loss = -(target * x.log_softmax(-1)).sum(-1)
    loss.backward(dloss.double())
    return loss.detach(), x.grad


def run_ranked(ranks, whole, labels, dloss, vocab, smoothing):
    """(losses of all ranks, gradient [rows, 1, ranks * width])."""

    def main(rank, world):
        group = (
            world.group("tp", tuple(range(ranks)), rank) if ranks > 1 else solo("tp")
        )
        logits = whole.chunk(ranks, dim=-1)[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, labels, group, vocab, smoothing)
        loss.backward(dloss)
        return loss.detach(), logits.grad

    losses, gradients = zip(*run_ranks(ranks, main))
    return losses, torch.cat(gradients, dim=-1)


def assert_exact(got, want, dtype, scale=1.0):
    """16 bits: one rounding. fp32: exp(x - lse) has the rounding of x - lse, up to 25 here, and that of lse;
    where a difference of probability and target is taken, their rounding remains."""
    rtol = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=2e-6 * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ranks, vocab, width", SHAPES)
def test_loss_and_gradient_equal_float64(ranks, vocab, width, smoothing, dtype, on_gpu):
    smoothing = smoothing if vocab > 1 else 0.0
    whole, labels, dloss = sample(ranks, vocab, width, dtype)
    gpu = on_gpu(seed=ranks)
    losses, gradient = run_ranked(ranks, whole, labels, dloss, vocab, smoothing)
    assert len(gpu.launches) == 2 * ranks
    loss, wanted = exact(whole, labels, dloss, vocab, smoothing)
    for one in losses:
        assert torch.equal(one, losses[0])
        torch.testing.assert_close(one.double(), loss, rtol=2e-6, atol=2e-6)
    assert_exact(gradient[..., :vocab], wanted, dtype, SCALES[dtype])
    assert gradient[..., vocab:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("columns", [1, 3, 31, 4500])
def test_rows_may_begin_anywhere_and_what_lies_between_them_is_left_alone(
    columns, first, dtype, on_gpu
):
    whole, labels, dloss = sample(1, columns, columns, dtype, rows=3)
    memory = torch.full((3, first + columns + 5), 77.0, dtype=dtype)
    rows = memory[:, first : first + columns]
    rows.copy_(whole[:, 0])
    before = memory.clone()
    on_gpu()
    facts = kernels.cross_entropy_facts(rows, labels[:, 0], columns, True)
    assert torch.equal(memory, before)  # forward reads
    gradient = kernels.cross_entropy_gradient_(
        rows, labels[:, 0], facts[0], dloss[:, 0], columns, 1.0, 0.0
    )
    assert gradient.data_ptr() == rows.data_ptr()
    assert (memory[:, :first] == 77).all() and (
        memory[:, first + columns :] == 77
    ).all()
    loss, wanted = exact(whole, labels, dloss, columns, 0.0)
    torch.testing.assert_close(
        (facts[0] - facts[1]).double(), loss[:, 0], rtol=2e-6, atol=2e-6
    )
    torch.testing.assert_close(
        facts[2].double(), whole[:, 0].double().sum(-1), rtol=1e-5, atol=1e-3
    )
    assert_exact(gradient, wanted[:, 0], dtype, SCALES[dtype])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_warps_changes_no_bit(seed, on_gpu):
    whole, labels, dloss = sample(1, 4600, 4611, torch.bfloat16)
    results = []
    for s in (seed, seed + 10):
        on_gpu(s)
        losses, gradient = run_ranked(1, whole, labels, dloss, 4600, 0.1)
        results.append((losses[0], gradient))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_a_vocabulary_of_common_size_is_summed_as_exactly_as_a_small_one(on_gpu):
    whole, labels, dloss = sample(1, 50257, 50304, torch.float32, rows=2)
    on_gpu()
    losses, gradient = run_ranked(1, whole, labels, dloss, 50257, 0.0)
    loss, wanted = exact(whole, labels, dloss, 50257, 0.0)
    torch.testing.assert_close(losses[0].double(), loss, rtol=5e-7, atol=0)
    assert_exact(gradient[..., :50257], wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits_and_certain_labels(dtype, on_gpu):
    whole = torch.zeros(4, 1, 40, dtype=dtype)
    whole[0, 0, 4], whole[1, 0, 4] = 500.0, 500.0
    whole[2, 0, 3], whole[2, 0, 7] = (
        8.0,
        -10.0,
    )  # p = 1 - 0.013 and 1.5e-8: no numbers of 16 bits
    whole[3] = -600.0
    labels, dloss = (
        torch.tensor([[4], [7], [3], [0]]),
        torch.full((4, 1), SCALES[dtype]),
    )
    on_gpu()
    losses, gradient = run_ranked(1, whole, labels, dloss, 40, 0.0)
    loss, wanted = exact(whole, labels, dloss, 40, 0.0)
    assert losses[0][:2].tolist() == [[0.0], [500.0]]
    torch.testing.assert_close(
        losses[0].double(), loss, rtol=0, atol=3.1e-5
    )  # half a unit of lse, 596
    # The difference to 1 has the rounding of lse, 8: half a unit of it is 5e-7.
    rtol = max(torch.finfo(dtype).eps, 1e-4)
    torch.testing.assert_close(gradient[2].double(), wanted[2], rtol=rtol, atol=0)


def test_a_row_without_gradient_becomes_zeros_unless_its_loss_is_not_finite(on_gpu):
    whole, labels, dloss = sample(1, 1000, 1003, torch.bfloat16)
    dloss[2:5] = 0
    whole[4, 0, 999] = torch.nan
    on_gpu()
    losses, gradient = run_ranked(1, whole, labels, dloss, 1000, 0.1)
    assert gradient[2:4].count_nonzero() == 0 and gradient[4, 0, :1000].isnan().all()
    assert losses[0].isnan().flatten().tolist() == [False] * 4 + [True] + [False] * 2
    assert gradient[:2].isfinite().all() and gradient[5:].isfinite().all()


def test_logits_of_minus_infinity_have_no_probability_also_where_a_rank_has_nothing_else(
    on_gpu,
):
    whole, _, dloss = sample(2, 1990, 1000, torch.float32)
    whole[..., 990:1990] = -torch.inf  # all columns of the second rank
    whole[..., :40] = -torch.inf
    labels = torch.full((7, 1), 50)
    on_gpu()
    losses, gradient = run_ranked(2, whole, labels, dloss, 1990, 0.0)
    loss, wanted = exact(whole[..., 40:990], labels - 40, dloss, 950, 0.0)
    torch.testing.assert_close(losses[1].double(), loss, rtol=2e-6, atol=2e-6)
    assert_exact(gradient[..., 40:990], wanted, torch.float32)
    assert (
        gradient[..., :40].count_nonzero() == 0
        and gradient[..., 990:].count_nonzero() == 0
    )


def test_infinite_logits_give_a_loss_that_is_not_finite(on_gpu):
    whole, labels, dloss = sample(1, 300, 304, torch.float16)
    whole[3, 0, 17] = torch.inf
    on_gpu()
    losses, gradient = run_ranked(1, whole, labels, dloss, 300, 0.0)
    assert [bool(x.isfinite()) for x in losses[0][:, 0]] == [True] * 3 + [False] + [
        True
    ] * 3
    assert gradient[3].isnan().any()


def test_no_rows_launch_nothing(on_gpu):
    gpu = on_gpu()
    facts = kernels.cross_entropy_facts(
        torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 9, True
    )
    assert facts.shape == (3, 0) and not gpu.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_at_the_start_of_a_run_passes_and_finds_a_wrong_kernel(dtype, on_gpu):
    gpu, cpu = on_gpu(), torch.device("cpu")
    operations = [
        OPERATIONS[name] for name in ("cross_entropy_facts", "cross_entropy_gradient_")
    ]
    assert [failure(o, o.implementations[0], dtype, cpu) for o in operations] == [
        "",
        "",
    ]
    assert len(gpu.launches) == 2
    wrong = (lambda x, *_: x.new_ones(3, len(x))), lambda x, *_: x
    assert all(
        "wrong" in failure(o, replace(o.implementations[0], function=f), dtype, cpu)
        for o, f in zip(operations, wrong)
    )


def test_a_plan_counts_twelve_bytes_a_row_besides_the_logits():
    logits = torch.zeros(
        64, 2, 512, dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    labels = torch.zeros(64, 2, dtype=torch.int64, device="meta")
    with AliveBytes(peak=True) as alive:
        loss = vocab_parallel_cross_entropy(logits, labels, solo("tp"), 500).sum()
        assert alive.now() == 128 * 12 + 4
        loss.backward()
    assert alive.peak < 128 * 40


def test_logits_beyond_the_limits_are_left_to_torch():
    logits = torch.empty(2**31, 8, device="meta", dtype=torch.bfloat16)
    assert "too many" in kernels.fits(logits, None, 8) and not kernels.fits(
        logits[:7], None, 8
    )
    assert "side by side" in kernels.fits(logits[:8].t(), None, 8)
