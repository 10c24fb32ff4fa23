"""The divergence of logits that ranks share, and its gradient, against whole logits in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.extensions.distillation.divergence import Columns, DistilledTokens
from megatron_ds.extensions.distillation.likeliest_tokens import likeliest_tokens
from megatron_ds.extensions.distillation.whole_teacher import WholeTeacher
from megatron_ds.ops.logits import row_parts
from megatron_ds.ops.soft_cap import capped
from megatron_ds.tensor_parallel.linear import column_linear
from megatron_ds.tensor_parallel.logits_in_chunks import LogitsInChunks
from megatron_ds.tensor_parallel.logits_in_parts import losses_of
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

S, B, V = 6, 2, 21
STUDENT, TEACHER = 5, 7  # hidden sizes
TEMPERATURE = 2.5


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(1))
X, W = randn(S, B, STUDENT, seed=2), randn(V, STUDENT, seed=3)
TEACHER_X, TEACHER_W = randn(S, B, TEACHER, seed=4), randn(V, TEACHER, seed=5)
DLOSSES = randn(2, S, B, seed=6)


def shard(weight, padded, rank, ranks):
    """The rank's rows of a padded vocabulary, whose padding has values that must not matter."""
    padding = torch.full((padded - V, weight.shape[1]), 3.0)
    return torch.cat([weight, padding]).chunk(ranks)[rank].clone()


def teacher_of(count, columns, x, weight, sequence_parallel, cap):
    if count is None:
        return WholeTeacher(x, weight, None, sequence_parallel, cap)
    if sequence_parallel:
        x = TEACHER_X
    logits = (x @ weight.t()).flatten(0, 1)
    if cap is not None:
        logits = capped(logits, cap)
    return likeliest_tokens(row_parts(logits), columns, count)


def on_ranks(ranks, padded, count, reverse, chunks, sequence_parallel=False, cap=None):
    """(losses [2, s, b], dx, dw of the padded weight) with whole logits, or with logits in chunks."""

    def main(rank, world):
        group = world.group("tp", tuple(range(ranks)), rank)
        part = lambda t: t.chunk(ranks)[rank] if sequence_parallel else t
        weight = shard(W, padded, rank, ranks).requires_grad_()
        x = part(X).clone().requires_grad_()
        columns = Columns(len(weight), group, V, TEMPERATURE)
        theirs = shard(TEACHER_W, padded, rank, ranks)
        teacher = teacher_of(
            count, columns, part(TEACHER_X), theirs, sequence_parallel, cap
        )
        loss = DistilledTokens(LABELS.reshape(-1), columns, teacher, reverse)
        if chunks:
            logits = LogitsInChunks(
                x, weight, None, group, sequence_parallel, chunks, cap
            )
        else:
            logits = column_linear(x, weight, None, group, sequence_parallel)
            logits = logits if cap is None else capped(logits, cap)
        losses = losses_of(logits, loss)
        losses.backward(DLOSSES)
        return losses.detach(), x.grad, weight.grad

    found = run_ranks(ranks, main)
    for losses, *_ in found:
        assert torch.equal(losses, found[0][0])
    dx = torch.cat([f[1] for f in found]) if sequence_parallel else found[0][1]
    return found[0][0], dx, torch.cat([f[2] for f in found])


def rounding() -> float:
    """The error of a divergence in fp32, which is a sum of numbers as large as the logits that nearly cancel.

    Each is rounded to half a unit, eight times: the logit, the logarithm of the sum, their difference, its product
    with a probability, the sum of the outcomes and its difference with the logarithm; for the teacher, the logit and
    the logarithm. How far a processor comes near it depends on the order of its sums.
    """
    ours = X.double() @ W.double().t()
    theirs = TEACHER_X.double() @ TEACHER_W.double().t()
    largest = max(float(ours.abs().max()), float(theirs.abs().max()))
    return 8 * largest * torch.finfo(torch.float32).eps / 2


def in_plain_torch(count, reverse, cap=None):
    """The same in double precision. With `count` the teacher's likeliest tokens, and all others as one outcome."""
    x, weight = X.double().requires_grad_(), W.double().requires_grad_()
    logits = x @ weight.t()
    theirs = TEACHER_X.double() @ TEACHER_W.double().t()
    if cap is not None:
        logits = cap * (logits / cap).tanh()
        theirs = cap * (theirs / cap).tanh()
    language = F.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none"
    ).view(S, B)
    p = (theirs / TEMPERATURE).softmax(-1)
    q = (logits / TEMPERATURE).softmax(-1)
    if count is not None:
        kept = p.topk(count).indices
        p, q = (
            torch.cat([c := t.gather(-1, kept), 1 - c.sum(-1, keepdim=True)], -1)
            for t in (p, q)
        )
    target, of = (p, q) if reverse else (q, p)
    divergence = F.kl_div(target.log(), of, reduction="none").sum(-1)
    losses = torch.stack([language, divergence])
    losses.backward(DLOSSES.double())
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [None, 1, 4, V - 1])
@pytest.mark.parametrize(
    "ranks, padded, chunks, sequence_parallel",
    [
        (1, 21, None, False),
        (1, 24, 3, False),
        (2, 24, None, False),
        (2, 24, 5, True),
        (3, 36, None, True),  # the last rank has padding alone
        (3, 36, 2, False),
    ],
)
def test_losses_and_gradients_are_those_of_plain_torch(
    ranks, padded, chunks, sequence_parallel, count, reverse
):
    got = on_ranks(ranks, padded, count, reverse, chunks, sequence_parallel)
    losses, dx, dw = in_plain_torch(count, reverse)
    torch.testing.assert_close(got[0].double(), losses, rtol=1e-6, atol=rounding())
    torch.testing.assert_close(got[1].double(), dx, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[2][:V].double(), dw, rtol=1e-5, atol=1e-5)
    assert not got[2][V:].any()


@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("chunks", [None, 5])
def test_both_models_may_cap_their_logits(chunks, count):
    got = on_ranks(2, 24, count, False, chunks, cap=2.0)
    losses, dx, dw = in_plain_torch(count, False, cap=2.0)
    torch.testing.assert_close(got[0].double(), losses, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), dx, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[2][:V].double(), dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [None, 3])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(
    monkeypatch, count, reverse
):
    here = globals()
    monkeypatch.setitem(here, "TEACHER_X", X)
    monkeypatch.setitem(here, "TEACHER_W", W)
    only = DLOSSES * torch.tensor([0.0, 1.0])[:, None, None]
    monkeypatch.setitem(here, "DLOSSES", only)
    losses, dx, dw = on_ranks(2, 24, count, reverse, None)
    assert losses[0].min() > 0
    for zero in (losses[1], dx, dw):
        torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=2e-6)


def test_fewer_outcomes_are_never_further_apart():
    apart = [on_ranks(1, 21, k, False, None)[0][1] for k in (1, 2, 5, 20, None)]
    for fewer, more in zip(apart, apart[1:]):
        assert (fewer <= more + 1e-6).all()
    torch.testing.assert_close(apart[-2], apart[-1])
