"""A user's expert-parallel module: gradients of experts are reduced over the ranks that hold them, as in one
process."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import Init, ParamSpec, Split
from tests.harness.engine_runs import EPS, config_of
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

EXPERTS, WIDTH, TOKENS, STEPS = 4, 6, 8, 3


class AllToAll(torch.autograd.Function):
    """x [ranks, tokens, h]: slice r goes to rank r; backward sends gradients the way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        group.transport.all_to_all(out, x.contiguous()).wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.register_buffer("factor", torch.rand(3))

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.factor.sum()


class Experts(nn.Module):
    """x [tokens, h] → x + its expert's output. Token t goes to expert (t + shift) % EXPERTS; experts are cut
    over `group`.

    idle: this expert is not called; its tokens stay as they are.
    """

    def __init__(self, group=None):
        super().__init__()
        self.group, self.idle = group, None
        torch.manual_seed(5)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        experts = [Expert() for _ in range(EXPERTS)]
        stacked = torch.randn(EXPERTS, WIDTH) / 3
        parts, part = (group.size, group.rank) if group else (1, 0)
        n = EXPERTS // parts
        self.experts = nn.ModuleList(experts[part * n : (part + 1) * n])
        self.stacked = nn.Parameter(stacked[part * n : (part + 1) * n].clone())
        for p in (*self.experts.parameters(), self.stacked):
            p.allreduce, p.group_name = False, f"ep_size_{parts}"

    def forward(self, x):
        x = x + self.router(x)
        by_expert = x.view(-1, EXPERTS, WIDTH).transpose(0, 1)  # [E, tokens of each, h]
        n, tokens = len(self.experts), by_expert.shape[1]
        if (
            self.group
        ):  # tokens of this rank's experts come from all ranks: [n, ranks * tokens, h]
            sent = AllToAll.apply(
                by_expert.reshape(self.group.size, n * tokens, WIDTH), self.group
            )
            by_expert = (
                sent.view(-1, n, tokens, WIDTH).transpose(0, 1).reshape(n, -1, WIDTH)
            )
        first = n * (self.group.rank if self.group else 0)
        made = [
            x_e if first + e == self.idle else expert(x_e) + self.stacked[e]
            for e, (expert, x_e) in enumerate(zip(self.experts, by_expert))
        ]
        out = torch.stack(made)
        if self.group:
            back = (
                out.view(n, self.group.size, tokens, WIDTH)
                .transpose(0, 1)
                .reshape(self.group.size, n * tokens, WIDTH)
            )
            out = AllToAll.apply(back, self.group).view(EXPERTS, tokens, WIDTH)
        return self.head(x + out.transpose(0, 1).reshape(x.shape)).square().mean()


def batches(ranks, rank=None):
    generator = torch.Generator().manual_seed(8)
    data = [
        torch.randn(ranks, TOKENS, WIDTH, generator=generator) for _ in range(STEPS)
    ]
    return [list(x) if rank is None else [x[rank]] for x in data]


def config(stage, **more):
    return config_of(stage, 4) | {"train_batch_size": 4} | more


def on_expert_ranks(main, stage, ep=2):
    def run(rank, world):
        mesh = Mesh(Grid(dp=4, ep=ep), rank, world.connect)
        return main(
            megatron_ds.initialize(
                model=Experts(mesh.group("ep")), config=config(stage), mpu=mesh
            ).engine,
            rank,
        )

    return run_ranks(4, run)


def train(engine, rank, steps=slice(None)):
    norms = []
    for [x] in batches(4, rank)[steps]:
        engine.backward(engine(x))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def one_process():
    plain = Experts()
    norms = train_plainly(
        plain,
        lambda module, x: module(x),
        batches(4),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    assert min(norms) > 0.5, "clipping is in force"
    return norms, plain.state_dict()


def assert_same_state(state, expected, ep=2):
    """The stacked parameter has a name for each part; the names of experts in a list are those of one
    process."""
    found = dict(state)
    found["stacked"] = torch.cat(
        [found.pop(f"stacked.expert_part_{part}_of_{ep}") for part in range(ep)]
    )
    assert found.keys() == expected.keys()
    for name, value in found.items():  # other orders of summation
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_expert_parallel_modules_train_as_one_process_with_all_experts(stage, ep):
    norms, expected = one_process()
    results = on_expert_ranks(
        lambda engine, rank: (train(engine, rank), engine.full_state_dict()), stage, ep
    )
    for found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    assert_same_state(results[0][1], expected, ep)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_expert_without_tokens_on_one_of_its_ranks_adds_nothing_there(stage):
    """Expert 3 is on ranks 1 and 3; rank 1, which has the tokens of ranks 0 and 1, does not call it."""
    calls = []

    def loss_of(module, x):
        module.idle = 3 if len(calls) % 4 < 2 else None
        calls.append(x)
        return module(x)

    plain = Experts()
    norms = train_plainly(
        plain, loss_of, batches(4), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )

    def main(engine, rank):
        engine.module.idle = 3 if rank == 1 else None
        return train(engine, rank), engine.full_state_dict()

    results = on_expert_ranks(main, stage)
    assert results[0][0] == pytest.approx(norms, rel=1e-5)
    assert_same_state(results[0][1], plain.state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_keep_every_expert_and_load_at_the_same_and_at_another_ep(
    stage, tmp_path
):
    def save(engine, rank):
        train(engine, rank, slice(2))
        engine.save_checkpoint(tmp_path)
        before = engine.full_state_dict()
        return before, train(engine, rank, slice(2, 3))

    def load(engine, rank):
        engine.load_checkpoint(tmp_path)
        return engine.full_state_dict(), train(engine, rank, slice(2, 3))

    saved, loaded = on_expert_ranks(save, stage), on_expert_ranks(load, 0)
    assert (
        saved[0][0].keys() == loaded[0][0].keys()
        and len(saved[0][0]) == len(one_process()[1]) + 1
    )
    assert all(
        torch.equal(value, loaded[0][0][name]) for name, value in saved[0][0].items()
    )
    for (_, norms), (_, expected) in zip(saved, loaded):
        assert norms == pytest.approx(expected, rel=1e-5)


def test_lists_of_experts_load_at_another_ep(tmp_path):
    def build(mesh):
        module = Experts(mesh.group("ep"))
        del module.stacked
        module.stacked = torch.zeros(EXPERTS, WIDTH)
        return module

    def run(ep, main):
        def rank_main(rank, world):
            mesh = Mesh(Grid(dp=4, ep=ep), rank, world.connect)
            return main(
                megatron_ds.initialize(
                    model=build(mesh), config=config(1), mpu=mesh
                ).engine,
                rank,
            )

        return run_ranks(4, rank_main)[0]

    def save(engine, rank):
        train(engine, rank, slice(1))
        engine.save_checkpoint(tmp_path)
        return engine.full_state_dict(), train(engine, rank, slice(1, 3))

    def load(engine, rank):
        engine.load_checkpoint(tmp_path)
        return engine.full_state_dict(), train(engine, rank, slice(1, 3))

    (state, norms), (other, expected) = run(2, save), run(4, load)
    assert state.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in state.items()
    )
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_may_change_the_experts_that_it_holds(stage):
    def main(engine, rank):
        with engine.gathered_parameters(modifier_rank=2), torch.no_grad():
            if rank == 2:
                engine.module.experts[1].up.bias.fill_(7)
        return engine.full_state_dict()

    before, after = Experts().state_dict(), on_expert_ranks(main, stage)[0]
    assert (after.pop("experts.1.up.bias") == 7).all()  # rank 2 holds part 0
    for name in before.keys() & after.keys():
        assert torch.equal(after[name], before[name]), name


class WithSpecs(Experts):
    """Parameters of the experts have specs already, as those of this package's layers do."""

    def __init__(self, group=None, stacked=()):
        super().__init__(group)
        for name, p in self.experts.named_parameters():
            p.spec = ParamSpec(f"experts.{name}", tuple(p.shape), Init("zeros"))
        if stacked:
            del self.stacked.allreduce, self.stacked.group_name
            self.stacked.spec = ParamSpec(
                "stacked", (EXPERTS, WIDTH), Init("zeros"), stacked
            )


class Stacked(nn.Module):
    """Nothing but a part of a stacked parameter, whose spec is split over "ep"; no marks."""

    def __init__(self, group):
        super().__init__()
        self.stacked = nn.Parameter(torch.zeros(EXPERTS // group.size, WIDTH))
        self.stacked.spec = ParamSpec(
            "stacked", (EXPERTS, WIDTH), Init("zeros"), (Split("ep", 0),)
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_marked_experts_that_have_specs_are_reduced_over_the_ranks_that_hold_them(
    stage,
):
    norms, expected = one_process()

    def run(rank, world):
        mesh = Mesh(Grid(dp=4, ep=2), rank, world.connect)
        engine = megatron_ds.initialize(
            model=WithSpecs(mesh.group("ep")), config=config(stage), mpu=mesh
        ).engine
        return train(engine, rank), engine.full_state_dict()

    results = run_ranks(4, run)
    assert results[0][0] == pytest.approx(norms, rel=1e-5)
    assert_same_state(results[0][1], expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_split_over_ep_by_its_spec_is_one_tensor_that_loads_at_any_ep(
    stage, tmp_path
):
    norms, expected = one_process()

    def run(ep, main):
        def rank_main(rank, world):
            mesh = Mesh(Grid(dp=4, ep=ep), rank, world.connect)
            module = WithSpecs(mesh.group("ep"), stacked=(Split("ep", 0),))
            return main(
                megatron_ds.initialize(
                    model=module, config=config(stage), mpu=mesh
                ).engine,
                rank,
            )

        return run_ranks(4, rank_main)[0]

    def save(engine, rank):
        first = train(engine, rank, slice(2))
        engine.save_checkpoint(tmp_path)
        return first + train(engine, rank, slice(2, 3)), engine.full_state_dict()

    def load(engine, rank):
        engine.load_checkpoint(tmp_path)
        return train(engine, rank, slice(2, 3)), engine.full_state_dict()

    (all_norms, state), (last, loaded) = run(2, save), run(4, load)
    assert all_norms == pytest.approx(norms, rel=1e-5) and last == pytest.approx(
        norms[2:], rel=1e-5
    )
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------- what cannot be known
def test_marked_experts_without_known_ranks_are_refused():
    def run(rank, world):
        mesh = Mesh(Grid(dp=4), rank, world.connect)
        module = Experts(SimpleNamespace(size=2, rank=rank % 2))
        with pytest.raises(
            ConfigError,
            match="9 parameters are marked .* not known which of the 4 .* hold the same",
        ):
            megatron_ds.initialize(model=module, config=config(0), mpu=mesh)

    run_ranks(4, run)


def test_another_size_of_groups_than_marked_is_refused():
    def run(rank, world):
        mesh = Mesh(Grid(dp=4, ep=4), rank, world.connect)
        with pytest.raises(
            ConfigError,
            match="'ep_size_2', but expert-data groups of 1 of 4 ranks mean .* groups of 4",
        ):
            megatron_ds.initialize(
                model=Experts(SimpleNamespace(size=2, rank=rank % 2)),
                config=config(0),
                mpu=mesh,
            )

    run_ranks(4, run)


def test_unmarked_experts_of_other_names_or_shapes_are_refused():
    def run(rank, world):
        mesh = Mesh(Grid(dp=2), rank, world.connect)
        for module in (
            nn.ModuleList(nn.Linear(2, 2) for _ in range(1 + rank)),
            nn.Linear(2, 3 + rank),
        ):
            with pytest.raises(
                ConfigError,
                match="different modules: (1.)?weight is (missing|of shape .*) on rank 0 and",
            ):
                megatron_ds.initialize(model=module, config=config(0), mpu=mesh)

    run_ranks(2, run)


def test_unmarked_parameters_that_alone_differ_are_reported(caplog):
    def run(rank, world):
        mesh = Mesh(Grid(dp=2), rank, world.connect)
        module = nn.ModuleDict({"dense": nn.Linear(3, 3), "experts": nn.Linear(3, 3)})
        with torch.no_grad():
            for i, p in enumerate(module.parameters()):
                p.copy_(
                    torch.arange(float(p.numel())).view(p.shape)
                    + (rank if i >= 2 else 0)
                )
        with caplog.at_level(logging.WARNING):
            megatron_ds.initialize(model=module, config=config(0), mpu=mesh)

    run_ranks(2, run)
    [record] = [
        r for r in caplog.records if "differ between data-parallel ranks" in r.message
    ]
    assert "2 parameters, first experts.weight" in record.message


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            WithSpecs,
            "9 parameters are marked as experts .* which of the 4 .* hold the same experts",
        ),
        (
            Stacked,
            r"stacked has shape \[2, 6\] here. Its spec.*1 model-parallel and 1 expert-parallel ranks",
        ),
    ],
)
def test_experts_with_specs_and_without_known_ranks_are_refused(kind, message):
    def run(rank, world):
        mesh = Mesh(Grid(dp=4), rank, world.connect)
        with pytest.raises(ConfigError, match=message):
            megatron_ds.initialize(
                model=kind(SimpleNamespace(size=2, rank=rank % 2)),
                config=config(0),
                mpu=mesh,
            )

    run_ranks(4, run)
