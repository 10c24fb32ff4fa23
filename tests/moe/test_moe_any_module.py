"""Experts of any module: DeepSpeed's gates, and training over expert-parallel ranks as in one process."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.moe import MoE
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import EPS, config_of
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

EXPERTS, WIDTH, TOKENS, STEPS, RANKS = 4, 6, 9, 3, 4
DROPLESS = dict(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
AUX = 0.3


class LoopedMoE(MoE):
    """The reference: every expert computes every token, in a loop; two experts, no limit, no noise."""

    def forward(self, hidden_states, used_token=None):
        x = hidden_states.flatten(0, -2)
        scores = (x.float() @ self.deepspeed_moe.gate.wg.weight.float().t()).softmax(1)
        best = scores.topk(2, dim=1)
        shares = torch.zeros_like(scores).scatter(
            1, best.indices, best.values / best.values.sum(1, True)
        )
        made = [expert(x)[0] for expert in self.deepspeed_moe.experts.deepspeed_experts]
        out = sum(share[:, None] * y for share, y in zip(shares.t(), made))
        first = nn.functional.one_hot(best.indices[:, 0], EXPERTS).float()
        l_aux = (scores.mean(0) * first.mean(0)).sum() * EXPERTS
        return out.view_as(hidden_states), l_aux, (shares > 0).sum(0)


class Expert(nn.Module):
    """An inner list has "expert" in its name too; a buffer."""

    def __init__(self):
        super().__init__()
        self.inner_experts = nn.ModuleList((nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)))
        self.register_buffer("number", torch.zeros(2))

    def forward(self, x):
        up, down = self.inner_experts
        return down(up(x).tanh()), "of a tuple the first element counts"


class Net(nn.Module):
    """x [s, b, h] → loss, a scalar."""

    def __init__(self, kind, recompute=False, **options):
        super().__init__()
        self.recompute = recompute
        torch.manual_seed(5)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.moe = kind(WIDTH, Expert(), EXPERTS, **options)

    def number(self, part):
        """Give experts different values, those of their numbers among all."""
        local = self.moe.deepspeed_moe.experts.deepspeed_experts
        for i, expert in enumerate(local):
            e = part * len(local) + i
            generator = torch.Generator().manual_seed(e)
            expert.number.fill_(e)
            for p in expert.parameters():
                p.data.copy_(torch.randn(p.shape, generator=generator) / 2)
        return self

    def forward(self, x):
        x = self.first(x.to(self.first.bias.dtype))
        made = (
            checkpoint(self.moe, x, use_reentrant=False)
            if self.recompute
            else self.moe(x)
        )
        self.counts = made[2]
        return self.head(x + made[0]).square().mean() + AUX * made[1]


def batches(ranks, rank=None):
    generator = torch.Generator().manual_seed(8)
    data = [
        torch.randn(ranks, 3, TOKENS // 3, WIDTH, generator=generator)
        for _ in range(STEPS)
    ]
    return [list(x) if rank is None else [x[rank]] for x in data]


def config(stage, **more):
    return config_of(stage, RANKS) | {"train_batch_size": RANKS} | more


def on_ranks(main, stage, ep, grid=None, configuration=None, **options):
    """main(engine, rank) on each rank, with experts divided over ep ranks."""
    grid = grid or Grid(dp=RANKS)
    nets = [
        Net(MoE, ep_size=ep, **options).number(rank % ep)
        for rank in range(grid.world_size)
    ]

    def run(rank, world):
        mesh = Mesh(grid, rank, world.connect)
        engine = megatron_ds.initialize(
            model=nets[rank], config=configuration or config(stage), mpu=mesh
        ).engine
        return main(engine, rank)

    return run_ranks(grid.world_size, run)


def train(engine, rank, steps=slice(None)):
    """(gradient norms, this rank's counts of choices)."""
    norms, counts = [], []
    for microbatches in batches(
        RANKS, rank if engine.gradient_accumulation_steps() == 1 else None
    )[steps]:
        for x in microbatches:
            engine.backward(engine(x))
            counts.append(engine.module.counts)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, counts


def one_process(**options):
    """Losses, norms and state of one rank that computes the micro-batches of all ranks in turn."""
    accumulates = config(
        0, gradient_accumulation_steps=RANKS, **options.pop("more", {})
    )
    return on_ranks(
        lambda engine, rank: (train(engine, rank), engine.full_state_dict()),
        0,
        1,
        Grid(),
        accumulates,
        **options,
    )[0]


def assert_same(found, expected, rtol=1e-5, atol=1e-6):
    """States of other orders of summation."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=rtol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


# ---------------------------------------------------------------------------------------- over several ranks
def looped_training():
    plain = Net(LoopedMoE, **DROPLESS).number(0)
    norms = train_plainly(
        plain,
        lambda module, x: module(x),
        batches(RANKS),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    assert min(norms) > 0.5, "clipping is in force"
    return norms, plain.state_dict()


looped = pytest.fixture(scope="module", name="looped")(looped_training)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_divided_experts_train_as_a_loop_over_all_of_them(stage, ep, looped):
    norms, expected = looped
    results = on_ranks(
        lambda engine, rank: (train(engine, rank)[0], engine.full_state_dict()),
        stage,
        ep,
        **DROPLESS,
    )
    for found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    assert_same(results[0][1], expected)


def test_the_expert_parallel_ranks_may_be_those_of_the_mesh(looped):
    norms, expected = looped
    results = on_ranks(
        lambda engine, rank: (train(engine, rank)[0], engine.full_state_dict()),
        1,
        2,
        Grid(dp=RANKS, ep=2),
        **DROPLESS,
    )
    assert results[0][0] == pytest.approx(norms, rel=1e-5)
    assert_same(results[0][1], expected)


def test_tensor_parallel_ranks_compute_the_same():
    """Data-parallel ranks 0 1 of two tensor-parallel ranks each: global ranks (0, 2) and (1, 3) divide the
    experts."""

    def main(engine, rank):
        for [x] in batches(2, rank // 2):
            engine.backward(engine(x))
            engine.step()
        return engine.full_state_dict()

    def alone(engine, rank):
        for microbatches in batches(2):
            for x in microbatches:
                engine.backward(engine(x))
                engine.step()
        return engine.full_state_dict()

    grid = Grid(tp=2, dp=2)
    nets = [Net(MoE, ep_size=2, k=2).number(rank // 2) for rank in range(4)]

    def run(rank, world):
        mesh = Mesh(grid, rank, world.connect)
        return main(
            megatron_ds.initialize(model=nets[rank], config=config(1), mpu=mesh).engine,
            rank,
        )

    twice = config(0, gradient_accumulation_steps=2, train_batch_size=2)
    expected = on_ranks(alone, 0, 1, Grid(), twice, k=2)
    assert_same(run_ranks(4, run)[0], expected[0])


@pytest.mark.parametrize(
    "stage, ep, options",
    [
        (0, 2, dict(k=1, capacity_factor=0.75, min_capacity=0)),  # random selection
        (3, 4, dict(k=1, noisy_gate_policy="RSample", use_residual=True)),
        (
            1,
            4,
            dict(k=2, capacity_factor=0.7, min_capacity=1, noisy_gate_policy="Jitter"),
        ),
        (2, 2, dict(k=3, capacity_factor=0.8, min_capacity=1, recompute=True)),
    ],
)
def test_drops_and_noise_are_those_of_one_process_with_the_same_calls(
    stage, ep, options
):
    (norms, counts), expected = one_process(**options)
    results = on_ranks(
        lambda engine, rank: (train(engine, rank), engine.full_state_dict()),
        stage,
        ep,
        **options,
    )
    for rank, ((found, found_counts), _) in enumerate(results):
        assert found == pytest.approx(norms, rel=1e-5)
        assert all(
            torch.equal(a, b)
            for a, b in zip(found_counts, counts[rank::RANKS], strict=True)
        )
    assert_same(results[0][1], expected)


def test_bf16_trains_as_one_process_within_its_rounding():
    more = {"bf16": {"enabled": True}}
    (norms, _), expected = one_process(more=more, k=2)
    found, state = on_ranks(
        lambda engine, rank: (train(engine, rank)[0], engine.full_state_dict()),
        2,
        2,
        None,
        config(2, **more),
        k=2,
    )[0]
    # The products of 9 and of 36 tokens are rounded to 8 bits at other places of a sum.
    assert found == pytest.approx(norms, rel=0.02)
    assert_same(state, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("stage, ep", [(0, 1), (3, 4), (1, 2)])
def test_a_checkpoint_has_every_expert_once_and_loads_at_any_ep(stage, ep, tmp_path):
    options = dict(k=2, noisy_gate_policy="Jitter")

    def save(engine, rank):
        train(engine, rank, slice(2))
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict(), train(engine, rank, slice(2, 3))[0]

    def load(engine, rank):
        engine.load_checkpoint(tmp_path)
        return engine.full_state_dict(), train(engine, rank, slice(2, 3))[0]

    state, norms = on_ranks(save, 3, 2, **options)[0]
    loaded, more_norms = on_ranks(load, stage, ep, **options)[0]
    assert state.keys() == loaded.keys() == Net(MoE, **options).state_dict().keys()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    numbers = [
        state[f"moe.deepspeed_moe.experts.deepspeed_experts.{e}.number"]
        for e in range(EXPERTS)
    ]
    assert [n[0].item() for n in numbers] == list(range(EXPERTS))
    assert more_norms == pytest.approx(norms, rel=1e-5)


def test_a_recomputed_layer_has_the_same_gradients():
    """Random selection and noise of the second forward are those of the first."""

    def gradients(engine, rank):
        engine.backward(engine(batches(1)[0][0]))
        engine.step()
        return engine.full_state_dict()

    options = dict(
        k=1, capacity_factor=0.5, min_capacity=0, noisy_gate_policy="RSample"
    )
    one = config(0, train_batch_size=1)
    states = [
        on_ranks(gradients, 0, 1, Grid(), one, recompute=recompute, **options)[0]
        for recompute in (False, True)
    ]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_copy_of_the_module_computes_over_the_same_ranks():
    def main(engine, rank):
        x = batches(RANKS, rank)[0][0]
        return engine(x), copy.deepcopy(engine.module)(x)

    assert all(torch.equal(*losses) for losses in on_ranks(main, 1, 2))
    layer = pickle.loads(pickle.dumps(MoE(WIDTH, nn.Linear(WIDTH, WIDTH))))
    assert layer(torch.ones(5, WIDTH))[0].shape == (5, WIDTH)


# ------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "ranks, ep, grid, match",
    [
        (
            2,
            4,
            {},
            r"ep_size=4, but there are 2 data-parallel ranks.*not the number of experts.*ep_size 1, 2\.",
        ),
        (
            4,
            2,
            {"ep": 4},
            r"ep_size=2, but the mpu has expert-parallel groups of 4 ranks. Use ep_size 4 or 1",
        ),
    ],
)
def test_ep_sizes_that_the_ranks_do_not_allow_are_refused(ranks, ep, grid, match):
    nets = [Net(MoE, ep_size=ep) for _ in range(ranks)]

    def run(rank, world):
        mesh = Mesh(Grid(dp=ranks, **grid), rank, world.connect)
        with pytest.raises(ConfigError, match=match):
            megatron_ds.initialize(model=nets[rank], config=config(0), mpu=mesh)

    run_ranks(ranks, run)


def test_layers_of_different_ep_sizes_are_refused_and_undivided_ones_allowed():
    def build(*sizes):
        return nn.ModuleList(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep) for ep in sizes)

    wrong, right = [build(2, 4) for _ in range(4)], [build(2, 1) for _ in range(4)]

    def run(rank, world):
        mesh = Mesh(Grid(dp=4), rank, world.connect)
        with pytest.raises(
            ConfigError,
            match=r"different ep_size: \{2: '0', 4: '1'\}.*one expert-parallel",
        ):
            megatron_ds.initialize(model=wrong[rank], config=config(0), mpu=mesh)
        engine = megatron_ds.initialize(
            model=right[rank], config=config(0), mpu=mesh
        ).engine
        x = torch.ones(4, WIDTH)
        engine.backward(sum(layer(x)[0].sum() for layer in engine.module))
        engine.step()
        return engine.full_state_dict()

    assert run_ranks(4, run)[0].keys() == build(1, 1).state_dict().keys()


def test_expert_tensor_parallelism_is_refused_with_tensor_parallel_ranks():
    nets = [Net(MoE, enable_expert_tensor_parallelism=True) for _ in range(2)]

    def run(rank, world):
        mesh = Mesh(Grid(tp=2), rank, world.connect)
        with pytest.raises(
            ConfigError, match="with 2 tensor-parallel ranks is not supported"
        ):
            megatron_ds.initialize(model=nets[rank], config=config(0), mpu=mesh)

    run_ranks(2, run)


def test_wrong_arguments_are_refused():
    expert = nn.Linear(WIDTH, WIDTH)
    for wrong, match in (
        (
            dict(num_experts=4, ep_size=3),
            "num_experts=4 and ep_size=3.*use ep_size 1, 2, 4",
        ),
        (
            dict(num_experts=2, k=3),
            "k=3 experts for a token, of num_experts=2.*from 1 to 2",
        ),
        (dict(num_experts=0), "num_experts=0"),
        (
            dict(noisy_gate_policy="jitter"),
            "'jitter' of an MoE layer is unknown.*'Jitter', 'RSample'",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            MoE(WIDTH, expert, **wrong)
    x = torch.zeros(2, 3, WIDTH)
    with pytest.raises(
        ConfigError,
        match="ep_size=2 is called on 1 rank: it holds 1 of 2.*initialize first",
    ):
        MoE(WIDTH, expert, 2, 2)(x)
    with pytest.raises(
        ConfigError, match=r"used_token has 5 elements, but .* \[2, 3, 6\] holds 6"
    ):
        MoE(WIDTH, expert)(x, torch.ones(5))
    with pytest.raises(
        ConfigError, match=r"returned \[6, 2\] for an input of \[6, 6\]"
    ):
        MoE(WIDTH, nn.Linear(WIDTH, 2))(x)


def test_experts_that_cannot_be_copied_are_refused():
    from megatron_ds.mpu.param_spec import Init, ParamSpec

    named = nn.Linear(WIDTH, WIDTH)
    named.weight.spec = ParamSpec("fc.weight", (WIDTH, WIDTH), Init("zeros"))
    with pytest.raises(ConfigError, match="weight of the expert has a spec, fc.weight"):
        MoE(WIDTH, named)

    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]

    def run(rank, world):
        megatron_ds.zero.Init(experts[rank], mpu=Mesh(Grid(dp=2), rank, world.connect))
        with pytest.raises(
            ConfigError, match="made under zero.Init.*outside of zero.Init"
        ):
            MoE(WIDTH, experts[rank])

    run_ranks(2, run)
