"""ZeRO++: weights gathered and gradients exchanged in blocks of integers, against one process that rounds the
same blocks, and against closed forms of the bytes.

The references below quantize parameter by parameter, in plain torch: largest magnitude of each 256 elements,
divided by 127 or 7.
"""

from functools import partial

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.optim import default_groups
from megatron_ds.zero.number_blocks import Blocks
from megatron_ds.zero.offload_settings import OffloadSettings
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.prediction import ElementBytes, predict_sets
from megatron_ds.zero.set_plan import ParameterUse
from megatron_ds.zero.settings import HIERARCHICAL, STAGES, ZeroSettings
from tests.harness import engines
from tests.harness.engines import BATCH, load_state, save_state
from tests.harness.engines import config_of as config_of_job
from tests.harness.engines import on_engines as run
from tests.harness.gradients import contribute
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job
from tests.zero.test_zero_hierarchy import SIZES, data_groups, make_optimizer
from tests.zero.test_zero_hierarchy import train as train_hierarchy
from tests.zero.test_zero_layers import config_of

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2, together=True)]

BLOCK, STEPS = 256, 3
train = partial(engines.train, learning_rate=1e-3)  # rounding shows little
WEIGHTS, GRADIENTS = Blocks(8, BLOCK), Blocks(4, BLOCK)


def rounded(x, bits):
    """What blocks of `bits` make of a tensor, in fp32."""
    flat, most = x.detach().float().flatten(), 2 ** (bits - 1) - 1
    padded = torch.zeros(-(-len(flat) // BLOCK) * BLOCK)
    padded[: len(flat)] = flat
    table = padded.view(-1, BLOCK)
    scale = table.abs().amax(1, keepdim=True) * (1 / most)
    codes = torch.where(scale > 0, (table / scale).round(), 0)
    return (codes * scale).flatten()[: len(flat)].view(x.shape)


# ---------------------------------------------------------------------------------------------- weights
def trained_in_one_process(style):
    """Losses and masters of a bf16 run whose weights are rounded before each step; masters are not."""

    def main(engine):
        losses = []
        for step in range(STEPS):
            with torch.no_grad():
                for p in engine.parameters:
                    p.copy_(rounded(p, 8))
            losses += train(engine, [step])
        return losses, masters(engine)

    [result] = run(config_of("dp=1", style, "bf16"), main)
    return result


def masters(engine):
    return {
        (piece.spec.name, piece.start): piece.tensor.detach().clone()
        for piece in engine.optimizer.pieces()
        if piece.kind == "weight"
    }


@pytest.mark.parametrize(
    "style, layouts",
    [
        ("gpt2", ("dp=4,zero=3,hpz=2,bucket=3000", "dp=2,pp=2,zero=3,pin=1")),
        ("llama", ("dp=2,zero=3,offload=cpu",)),
    ],
)
def test_quantized_weights_train_like_one_process_that_rounds_them(style, layouts):
    losses, whole = trained_in_one_process(style)
    [unquantized] = run(
        config_of("dp=1", style, "bf16"), lambda engine: train(engine, range(STEPS))
    )
    assert losses != pytest.approx(unquantized, rel=2e-6)
    for layout in layouts:
        results = run(
            config_of(f"{layout},persist=0,qw=1", style, "bf16"),
            lambda engine: (train(engine, range(STEPS)), masters(engine)),
        )
        for got, shards in results:
            assert got == pytest.approx(
                losses, rel=2e-5
            )  # 16-bit products of other micro-batches
            for (name, start), values in shards.items():
                expected = whole[name, 0].flatten()[start : start + len(values)]
                torch.testing.assert_close(values, expected, rtol=0, atol=3e-3 * STEPS)
    # The first loss has seen no update: the weights themselves are equal.
    assert results[0][0][0] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    "layout, dtype", [("dp=4,zero=3,hpz=2", "fp32"), ("dp=2,tp=2,zero=3", "bf16")]
)
def test_gathered_weights_are_the_rounded_masters_on_all_ranks(layout, dtype):
    def main(engine):
        train(engine, range(1))
        with engine.optimizer.gathered(0):
            gathered = {p.spec.name: p.detach().clone() for p in engine.parameters}
        return gathered, masters(engine), engine.mesh.coordinates["tp"][0]

    results = run(config_of(f"{layout},persist=0,qw=1", dtype=dtype), main)
    for gathered, _, tp in results:
        for name, values in gathered.items():
            shards = {
                start: shard
                for _, its_masters, its_tp in results
                if its_tp == tp
                for (of, start), shard in its_masters.items()
                if of == name
            }
            whole = torch.cat([shards[start] for start in sorted(shards)]).view(
                values.shape
            )
            expected = rounded(whole.to(values.dtype), 8).to(values.dtype)
            assert torch.equal(values, expected)
            assert values.dim() == 1 or not torch.equal(values, whole.to(values.dtype))


# -------------------------------------------------------------------------------------------- gradients
def gradient(rank, step, k, i):
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * k + i)
    return torch.randn(SIZES[i], generator=draw) * torch.logspace(-4, 0, SIZES[i])


def summed(rank, world, n, h, bucket_elements, stage=3, microbatches=2):
    """The sums of gradients that the ranks keep, put together: by plain descent from zero with rate -1."""
    policy = HIERARCHICAL if h > 1 else STAGES[stage]
    parameters, _ = make_optimizer(data_groups(world, rank, n, h), policy)
    for p in parameters:
        p.data = torch.zeros(p.shape)
    settings = ZeroSettings(
        default_groups(lambda g: torch.optim.SGD(g, lr=1.0)),
        policy,
        bucket_elements,
        gradient_blocks=GRADIENTS,
        persistence=0,
    )
    optimizer = ZeroOptimizer(
        parameters,
        settings,
        data_groups(world, rank, n, h),
        ParameterUse({0: [parameters[:2], parameters[2:]]}),
    )
    optimizer.begin_step()
    for k in range(microbatches):
        optimizer.arm()
        for i, p in reversed(list(enumerate(parameters))):
            contribute(p, gradient(rank, 0, k, i))
    optimizer.step(-1.0)
    with optimizer.gathered(0):
        return [p.detach().clone() for p in parameters]


def summed_by_hand(n, h, microbatches=2):
    """Each micro-batch: rounded to 8 bits inside a group, its sum to 4 bits between groups. Or once, to 4."""
    first = 4 if h == n else 8
    sums = []
    for i, size in enumerate(SIZES):
        total = torch.zeros(size)
        for k in range(microbatches):
            inner = [
                sum(rounded(gradient(rank, 0, k, i), first) for rank in range(o, o + h))
                for o in range(0, n, h)
            ]
            total += sum(
                inner if len(inner) == 1 else [rounded(part, 4) for part in inner]
            )
        sums.append(total)
    return sums


@pytest.mark.parametrize("n, h", [(2, 1), (3, 1), (4, 2), (6, 3), (6, 2)])
def test_quantized_gradients_are_the_sums_of_rounded_ones_whatever_the_buckets(n, h):
    expected = summed_by_hand(n, h if h > 1 else n)
    for size in (1, 500, 10_000):
        for got in run_ranks(n, lambda rank, world: summed(rank, world, n, h, size)):  # noqa: B023
            assert all(torch.equal(a, b) for a, b in zip(got, expected))
    exact = [
        sum(gradient(rank, 0, k, i) for rank in range(n) for k in range(2))
        for i in range(len(SIZES))
    ]
    assert not any(torch.equal(a, b) for a, b in zip(expected, exact))
    for rank_sums in run_ranks(
        n, lambda rank, world: summed(rank, world, n, 1, 500, stage=2)
    ):
        assert all(torch.equal(a, b) for a, b in zip(rank_sums, summed_by_hand(n, n)))


def test_a_gradient_that_is_not_finite_skips_the_step():
    def main(rank, world):
        parameters, optimizer = make_optimizer(
            data_groups(world, rank, 4, 2), HIERARCHICAL, gradient_blocks=GRADIENTS
        )
        optimizer.begin_step()
        optimizer.arm()
        for p in reversed(parameters):
            contribute(p, torch.inf if rank == 2 and p is parameters[1] else 1.0)
        return optimizer.step(0.01)

    assert all(not result.grad_norm < torch.inf for result in run_ranks(4, main))


def test_all_ranks_of_a_communicator_exchange_in_the_same_order():
    n, h, seen = 4, 2, {}

    def main(rank, world):
        seen[rank] = []
        add = world.traffic[rank].add
        world.traffic[rank].add = lambda operation, axes, size, count, *calls: (
            seen[rank].append((axes, operation, count)),
            add(operation, axes, size, count, *calls),
        )
        train_hierarchy(
            rank,
            world,
            n,
            h,
            HIERARCHICAL,
            microbatches=3,
            weight_blocks=WEIGHTS,
            gradient_blocks=GRADIENTS,
        )

    run_ranks(n, main)
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert {
        ("dp-cp-inner", "all_to_all"),
        ("dp-cp-outer", "all_to_all"),
        ("dp-cp-outer", "all_gather"),
        ("dp-cp-inner", "all_gather"),
    } <= {entry[:2] for entry in seen[0]}


# ------------------------------------------------------------------------------------------------ bytes
def bytes_between_nodes(traffic, ranks_of_node):
    """What the ranks of a node send to another one. Flat collectives are rings: one of the node's ranks sends
    out of it. In groups of one rank of each node all of it leaves."""
    return sum(
        ranks_of_node * count if axes == "dp-cp-outer" else count
        for (op, axes, _), count in traffic.wire_bytes().items()
        if axes in ("dp-cp", "dp-cp-outer") and op != "all_reduce"
    )


def test_four_times_less_is_sent_between_nodes():
    """Two nodes of two ranks, bf16, one micro-batch. ZeRO 3: three rings of 2Ψ bytes, 3/4 of each; ZeRO++: a
    gather of Ψ and an exchange of Ψ/2, half of each, and their scales."""

    def main(engine):
        train(engine, range(1))
        engine.mesh.traffic.clear()
        train(engine, range(1))
        psi = sum(s.plan.layout.numel for s in engine.optimizer.sets)
        return bytes_between_nodes(engine.mesh.traffic, 2), psi

    plain, quantized = (
        run(config_of(f"dp=4,zero=3,persist=0,grads=bf16,{more}", dtype="bf16"), main)
        for more in ("pin=0", "hpz=2,qw=1,qg=1")
    )
    for (sent, psi), (fewer, padded) in zip(plain, quantized):
        assert sent == 3 * 2 * psi * 3 / 4
        assert fewer == (1 + 4 / BLOCK + 1 / 2 + 4 / BLOCK) * padded / 2
        assert sent >= 4 * fewer and 6 * psi / (1.5 * padded + 8 / BLOCK * padded) > 3


def test_state_is_what_was_predicted():
    n, h = 6, 3

    def main(rank, world):
        _, optimizer = make_optimizer(
            data_groups(world, rank, n, h),
            HIERARCHICAL,
            torch.bfloat16,
            weight_blocks=WEIGHTS,
            gradient_blocks=GRADIENTS,
        )
        plans = [s.plan for s in optimizer.sets]
        psi = sum(plan.layout.numel for plan in plans if plan.units)
        small = sum(plan.layout.numel for plan in plans if not plan.units)
        return (
            optimizer.memory(),
            predict_sets(plans, {("dp", "cp"): rank}, ElementBytes(2, 4)),
            psi,
            small,
        )

    for held, predicted, psi, small in run_ranks(n, main):
        assert held == predicted
        assert (
            held.parameters
            == 2 * small + 2 * psi // n + psi // h + 4 * psi // BLOCK // h
        )


# -------------------------------------------------------------------------------------------- layouts
def losses_of(layout, *more):
    """On the first rank. Untied: an embedding on two stages has two gradients, rounded before their sum."""
    job = [*tiny_job("gpt2", "fp32", True, 0.0, 2, BATCH, 8), *more]
    main = lambda engine: train(engine, range(STEPS))
    return run(config_of_job(job, layout), main)[0]


@pytest.mark.parametrize(
    "layout, other",
    [
        (
            "dp=2,tp=2,pp=2,zero=3,qw=1,qg=1,persist=0",
            "dp=2,tp=2,zero=3,qw=1,qg=1,bucket=2000,persist=0",
        ),
        (
            "dp=2,zero=2,qg=1,accumulate=full",
            "dp=2,zero=3,qg=1,accumulate=full,persist=0",
        ),
        ("dp=4,zero=3,qw=1,persist=0", "dp=2,zero=3,qw=1,persist=0"),
    ],
)
def test_layouts_that_round_the_same_blocks_train_alike(layout, other):
    """Pipelines, buckets and stages move no block; quantized weights are those of any number of ranks."""
    one, plain = losses_of(layout), losses_of("dp=2")
    assert one == pytest.approx(losses_of(other), rel=1e-6)
    assert one == pytest.approx(plain, rel=2e-3) and one != pytest.approx(
        plain, rel=1e-6
    )


def test_experts_train_alike_on_any_number_of_ranks():
    experts = "--num-experts 4 --moe-router-topk 4".split()
    one = losses_of("dp=4,ep=2,zero=3,hpz=2,qw=1,persist=0", *experts)
    assert one == pytest.approx(
        losses_of("dp=2,zero=3,qw=1,persist=0", *experts), rel=1e-6
    )
    two = losses_of("dp=4,ep=2,zero=3,hpz=2,qw=1,qg=1,persist=0", *experts)
    assert two == pytest.approx(one, rel=2e-3) and two != pytest.approx(one, rel=1e-6)


def test_a_checkpoint_holds_masters_and_continues_at_another_layout(tmp_path):
    def first(engine):
        train(engine, range(2))
        return save_state(engine, tmp_path, 2), train(engine, range(2, 4))

    def second(engine):
        load_state(engine, tmp_path, 2, numbers)
        return train(engine, range(2, 4))

    more = {"dtype": "bf16"}
    numbers, expected = run(config_of("dp=2,zero=3,persist=0,qw=1", **more), first)[0]
    for losses in run(config_of("dp=4,zero=3,hpz=2,persist=0,qw=1", **more), second):
        assert losses == pytest.approx(expected, rel=1e-4)


# ----------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "stage, options, legal",
    [
        (2, {"weight_blocks": WEIGHTS}, "--zero-stage 3"),
        (1, {"gradient_blocks": GRADIENTS}, "--zero-stage 2 or 3"),
        (
            3,
            {"weight_blocks": WEIGHTS, "offload": OffloadSettings(parameters="cpu")},
            "without --offload-param",
        ),
    ],
)
def test_settings_of_another_stage_are_refused(stage, options, legal):
    with pytest.raises(ConfigError, match=legal):
        ZeroSettings((), STAGES[stage], **options)
