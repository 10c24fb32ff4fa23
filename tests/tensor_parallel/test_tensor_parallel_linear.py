"""Column and row linears on threaded ranks against one torch linear that holds the whole weight."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_ds.errors import LayoutError
from megatron_ds.mpu.group import coordinates_of, solo
from megatron_ds.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.harness.gradients import accumulated, install
from tests.harness.model_runs import context_of
from tests.harness.shards import assemble, cut
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

S, B, IN, MIDDLE, OUT = 12, 2, 5, 24, 7
LAYOUTS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, DY = randn(S, B, IN, seed=1), randn(S, B, OUT, seed=2)
WEIGHTS = [
    randn(MIDDLE, IN, seed=3),
    randn(MIDDLE, seed=4),
    randn(OUT, MIDDLE, seed=5),
    randn(OUT, seed=6),
]


def make_pair(group, sequence_parallel=False, bias=True):
    ctx, options = (
        context_of(group, sequence_parallel=sequence_parallel),
        dict(init_std=0.02, bias=bias),
    )
    pair = (
        ColumnParallelLinear(IN, MIDDLE, ctx, name="a", **options),
        RowParallelLinear(MIDDLE, OUT, ctx, name="b", **options),
    )
    values = WEIGHTS if bias else WEIGHTS[::2]
    parameters = [p for layer in pair for p in layer.parameters()]
    for parameter, logical in zip(parameters, values):
        parameter.data.copy_(cut(logical, parameter.spec, coordinates_of(group)))
    return pair, parameters


def install_main_grads(parameters):
    """What ZeRO's buckets do to weights: a place for the gradient, and a bell."""
    calls = []
    for parameter in parameters:
        total = torch.zeros_like(parameter, dtype=torch.float32)
        install(parameter, total, lambda name=parameter.spec.name: calls.append(name))
    return calls


def plain_pair():
    """Output, input gradient and the four parameter gradients of the whole pair, by torch."""
    x, weights = (
        X.clone().requires_grad_(),
        [w.clone().requires_grad_() for w in WEIGHTS],
    )
    y = F.linear(
        torch.tanh(F.linear(x, weights[0], weights[1])), weights[2], weights[3]
    )
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], DY)]


def collect(results, sequence_parallel):
    """The ranks' (y, dx, gradients, specs) as logical tensors."""
    ys, dxs, gradients, specs = zip(*results)
    if sequence_parallel:
        y, dx = torch.cat(ys), torch.cat(dxs)
    else:
        assert all(torch.equal(y, ys[0]) for y in ys) and all(
            torch.equal(dx, dxs[0]) for dx in dxs
        )
        y, dx = ys[0], dxs[0]
    whole = []
    for spec, shards in zip(specs[0], zip(*gradients)):
        shards = [sum(shards)] * len(shards) if spec.partial_over else list(shards)
        whole.append(assemble(shards, spec))
    return [y, dx, *whole]


def slice_of(x, group, sequence_parallel):
    return x.chunk(group.size)[group.rank] if sequence_parallel else x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("t, sequence_parallel", LAYOUTS)
def test_the_pair_equals_one_process(t, sequence_parallel, main_grad, recompute):
    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        (column, row), parameters = make_pair(group, sequence_parallel)
        calls = install_main_grads([column.weight, row.weight]) if main_grad else []
        x = slice_of(X, group, sequence_parallel).clone().requires_grad_()
        forward = lambda x: row(torch.tanh(column(x)))
        y = (
            checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else forward(x)
        )
        y.backward(slice_of(DY, group, sequence_parallel))
        assert calls == (["b.weight", "a.weight"] if main_grad else [])
        gradients = [accumulated(p) for p in parameters]
        assert not main_grad or column.weight.grad is None
        return y.detach(), x.grad, gradients, [p.spec for p in parameters]

    for ours, plain in zip(
        collect(run_ranks(t, rank_main), sequence_parallel), plain_pair(), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("t, sequence_parallel", [(2, False), (2, True)])
def test_a_second_backward_adds_to_the_main_grad(t, sequence_parallel):
    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        (column, row), _ = make_pair(group, sequence_parallel, bias=False)
        install_main_grads([column.weight, row.weight])
        x = slice_of(X, group, sequence_parallel).clone().requires_grad_()
        once = []
        for _ in range(2):
            row(torch.tanh(column(x))).backward(slice_of(DY, group, sequence_parallel))
            once = once or [
                accumulated(column.weight).clone(),
                accumulated(row.weight).clone(),
            ]
        torch.testing.assert_close(
            [accumulated(column.weight), accumulated(row.weight)], [2 * g for g in once]
        )

    run_ranks(t, rank_main)


def test_communication_is_what_the_papers_say():
    """Bytes per rank: one all-reduce each way, or with sequence parallelism gathers and reduce-scatters of
    the same size."""

    def rank_main(sequence_parallel):
        def main(rank, world):
            group = world.group("tp", (0, 1), rank)
            (column, row), _ = make_pair(group, sequence_parallel)
            x = slice_of(X, group, sequence_parallel).clone().requires_grad_()
            y = row(torch.tanh(column(x)))
            forward = dict(world.traffic[rank].bytes)
            y.backward(slice_of(DY, group, sequence_parallel))
            return forward, dict(world.traffic[rank].bytes)

        return main

    x_bytes, y_bytes = X.numel() * 4, DY.numel() * 4
    forward, total = run_ranks(2, rank_main(False))[0]
    assert forward == {("all_reduce", "tp", 2): y_bytes}
    assert total == {("all_reduce", "tp", 2): y_bytes + x_bytes}
    forward, total = run_ranks(2, rank_main(True))[0]
    assert forward == {
        ("all_gather", "tp", 2): x_bytes,
        ("reduce_scatter", "tp", 2): y_bytes,
    }
    assert total == {
        ("all_gather", "tp", 2): 2 * x_bytes + y_bytes,
        ("reduce_scatter", "tp", 2): y_bytes + x_bytes,
    }


def test_sequence_parallelism_keeps_only_the_slice_of_the_input():
    def rank_main(rank, world):
        group = world.group("tp", (0, 1, 2), rank)
        (column, _), _ = make_pair(group, sequence_parallel=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.numel()), t)[1], lambda t: t
        ):
            column(X.chunk(3)[rank].clone().requires_grad_())
        return kept

    assert run_ranks(3, rank_main)[0] == [S // 3 * B * IN]


@pytest.mark.parametrize("t", [1, 2, 3])
def test_gathered_output_is_whole_on_every_rank(t):
    def rank_main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        layer = ColumnParallelLinear(
            IN, MIDDLE, context_of(group), name="a", init_std=0.02, gather_output=True
        )
        layer.weight.data.copy_(cut(WEIGHTS[0], layer.weight.spec, {"tp": (rank, t)}))
        layer.bias.data.copy_(cut(WEIGHTS[1], layer.bias.spec, {"tp": (rank, t)}))
        x = X.clone().requires_grad_()
        y = layer(x)
        y.backward(torch.tanh(y.detach()))
        return y.detach(), x.grad

    x = X.clone().requires_grad_()
    plain = F.linear(x, *WEIGHTS[:2])
    (dx,) = torch.autograd.grad(plain, x, torch.tanh(plain.detach()))
    for y, x_grad in run_ranks(t, rank_main):
        torch.testing.assert_close(y, plain.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x_grad, dx, rtol=1e-5, atol=1e-5)


def test_packed_parts_are_split_each_by_itself():
    """[gate; up]: the rank's output is its piece of the gate and then its piece of up."""

    def rank_main(rank, world):
        group = world.group("tp", (0, 1), rank)
        layer = ColumnParallelLinear(
            IN,
            MIDDLE,
            context_of(group),
            name="fc1",
            init_std=0.02,
            parts=2,
            bias=False,
        )
        layer.weight.data.copy_(cut(WEIGHTS[0], layer.weight.spec, {"tp": (rank, 2)}))
        return layer(X).detach()

    gate, up = F.linear(X, WEIGHTS[0]).chunk(2, dim=-1)
    for rank, y in enumerate(run_ranks(2, rank_main)):
        torch.testing.assert_close(
            y,
            torch.cat((gate.chunk(2, -1)[rank], up.chunk(2, -1)[rank]), -1),
            rtol=1e-5,
            atol=1e-5,
        )


def test_bf16_gradients_add_up_in_fp32():
    group = solo("tp")
    layer = ColumnParallelLinear(
        IN, MIDDLE, context_of(group, dtype=torch.bfloat16), name="a", init_std=0.02
    )
    layer.weight.data.copy_(WEIGHTS[0])
    layer.bias.data.copy_(WEIGHTS[1])
    install_main_grads([layer.weight])
    dy = randn(S, B, MIDDLE, seed=9).bfloat16()
    layer(X.bfloat16()).backward(dy)
    expected = torch.einsum("sbo,sbi->oi", dy.float(), X.bfloat16().float())
    gradient = accumulated(layer.weight)
    assert gradient.dtype == torch.float32 and layer.weight.grad is None
    # product rounded to bf16
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


def test_frozen_parameters_and_inputs_get_no_gradient():
    (column, row), _ = make_pair(solo("tp"))
    column.weight.requires_grad_(False)
    row.bias.requires_grad_(False)
    row(torch.tanh(column(X))).backward(DY)
    assert column.weight.grad is None and row.bias.grad is None
    assert column.bias.grad is not None and row.weight.grad is not None


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_trained_is_decided_in_the_forward(is_trained):
    """Also for parameters that autograd does not follow: a network that is frozen for one forward alone."""
    pair, _ = make_pair(solo("tp"))
    added = []
    for layer in pair:
        for p in layer.parameters():
            install(p, torch.zeros_like(p), lambda p=p: added.append(p.spec.name))
            p.requires_grad_(is_trained)
    y = pair[1](torch.tanh(pair[0](X.clone().requires_grad_())))
    for layer in pair:
        layer.requires_grad_(not is_trained)
    y.backward(DY)
    every = ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert sorted(added) == (every if is_trained else [])


def test_any_memory_order_of_inputs_and_gradients_is_taken():
    (column, row), parameters = make_pair(solo("tp"))
    x = X.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y = row(torch.tanh(column(x)))
    y.backward(torch.ones(()).expand(y.shape))
    plain_x, weights = (
        X.clone().requires_grad_(),
        [w.clone().requires_grad_() for w in WEIGHTS],
    )
    F.linear(torch.tanh(F.linear(plain_x, *weights[:2])), *weights[2:]).sum().backward()
    torch.testing.assert_close(
        [x.grad, *(p.grad for p in parameters)],
        [plain_x.grad, *(w.grad for w in weights)],
        rtol=1e-4,
        atol=1e-4,
    )


def test_outputs_may_be_changed_in_place():
    (column, row), _ = make_pair(solo("tp"))
    row(column(X).tanh_()).add_(1.0).sum().backward()
    assert column.weight.grad is not None


def test_an_output_that_ranks_cannot_share_is_refused():
    def rank_main(rank, world):
        ColumnParallelLinear(
            4, 7, context_of(world.group("tp", (0, 1), rank)), name="odd", init_std=0.02
        )

    with pytest.raises(LayoutError, match="odd.weight"):
        run_ranks(2, rank_main)


@pytest.mark.parametrize("which", [0, 1], ids=["column", "row"])
def test_second_derivatives_are_refused_not_wrong(which):
    layer = make_pair(solo("tp"))[0][which]
    x = (X if which == 0 else randn(S, B, MIDDLE, seed=7)).clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_without_gradients_a_layer_can_be_mapped_by_torch_func():
    [column, row], _ = make_pair(solo("tp"))
    batches = torch.stack([X, X + 1])
    with torch.no_grad():
        mapped = torch.func.vmap(lambda x: row(column(x)))(batches)
        assert torch.allclose(mapped[1], row(column(batches[1])))
