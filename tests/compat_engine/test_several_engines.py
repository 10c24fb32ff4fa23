"""Several engines in one program, and engines that do not train: a GAN, a teacher and a student."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatron_ds
from megatron_ds.errors import MegatronDSError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    EPS,
    STEPS,
    Stack,
    assert_trained_as,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


# ----------------------------------------------------------------------------------------------- no optimizer
@pytest.mark.parametrize("stage", [0, 3])
def test_without_an_optimizer_it_computes_and_says_why_it_does_not_train(stage):
    def main(engine, rank):
        tokens = torch.arange(14).view(2, 7) % 11
        loss = loss_of(engine, tokens)
        with pytest.raises(MegatronDSError, match="this engine has no optimizer"):
            engine.backward(loss)
        return loss.item()

    plain = make(Stack)
    config = config_of(stage, 2)
    del config["optimizer"]
    expected = loss_of(plain, torch.arange(14).view(2, 7) % 11).item()
    assert on_ranks(2, main, lambda: make(Stack), config) == pytest.approx(
        [expected] * 2
    )
    assert (
        megatron_ds.initialize(
            model=make(Stack), config={"train_batch_size": 2}, mpu=Mesh(Grid(), 0)
        ).optimizer
        is None
    )


# ------------------------------------------------------------------------------------------------ two engines
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6)
        )

    def forward(self, x):
        return self.layers(x)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def adversaries(rank=None, ranks=2):
    """(real, noise) of each step, of one rank or all."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        real, noise = (
            torch.randn(8, 6, generator=generator),
            torch.randn(8, 5, generator=generator),
        )
        yield (
            (real, noise)
            if rank is None
            else (real.chunk(ranks)[rank], noise.chunk(ranks)[rank])
        )


def duel(g, d, batches, update):
    """The loop of DeepSpeed's GAN example. update(player, losses)"""
    losses = []
    for real, noise in batches:
        d.zero_grad()
        fake = g(noise)
        update(d, [F.softplus(-d(real)).mean(), F.softplus(d(fake.detach())).mean()])
        g.zero_grad()
        loss = F.softplus(-d(fake)).mean()
        update(g, [loss])
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stages", [(0, 0), (1, 2), (3, 3), (0, 3)])
def test_two_engines_train_each_other_as_with_torch_alone(stages):
    def engine_update(engine, losses):
        for loss in losses:
            engine.backward(loss)
        engine.step()

    def main(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        engines = []
        for module, stage in zip(modules[rank], stages):
            config = {
                "train_batch_size": 8,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": EPS}},
            }
            if stage == 3:
                config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            engines.append(
                megatron_ds.initialize(model=module, config=config, mpu=mesh).engine
            )
        losses = duel(*engines, adversaries(rank), engine_update)
        return losses, [weights(engine) for engine in engines]

    players = lambda: (torch.manual_seed(1), Generator(), Critic())[1:]
    modules = [players() for _ in range(2)]
    plain = players()
    optimizers = {
        p: torch.optim.AdamW(p.parameters(), lr=0.01, eps=EPS, weight_decay=0)
        for p in plain
    }

    def plain_update(player, losses):
        sum(losses).backward()
        optimizers[player].step()

    expected = duel(*plain, adversaries(), plain_update)
    results = run_ranks(2, main)
    mean = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in results))]
    assert mean == pytest.approx(expected, rel=1e-5)
    for player, name in zip(plain, (0, 1)):
        assert_trained_as([found[name] for _, found in results], player)


def test_gradients_of_another_engine_between_micro_batches_are_not_dropped_in_silence():
    def main(engine, rank):
        other = megatron_ds.initialize(
            model=nn.Linear(11, 11), config=config_of(0, 1), mpu=Mesh(Grid(), 0)
        ).engine
        tokens = batches(1, 2, 1, rank)[0][0]
        other.backward(other(engine(tokens)).sum())
        engine.zero_grad()  # drops what `other` left
        engine.backward(loss_of(engine, tokens))
        engine.step()
        other.step()
        engine.zero_grad()
        other.backward(other(engine(tokens)).sum())
        with pytest.raises(
            MegatronDSError,
            match="after micro-batch 1 of the 2 .* another engine has added",
        ):
            engine.zero_grad()
        engine.discard_gradients()
        return train(engine, rank), weights(engine)

    fresh = lambda engine, rank: (train(engine, rank), weights(engine))
    [(norms, found)], [(expected, whole)] = (
        on_ranks(1, run, lambda: make(Stack), config_of(0, 1, 2))
        for run in (main, fresh)
    )
    assert norms == expected and all(
        torch.equal(p, whole[name]) for name, p in found.items()
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_student_learns_from_a_teacher_of_another_engine(stage):
    def main(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        teacher_config = {
            key: value
            for key, value in config_of(stage, 2).items()
            if key != "optimizer"
        }
        teacher = megatron_ds.initialize(
            model=modules[rank][0], config=teacher_config, mpu=mesh
        ).engine.eval()
        student = megatron_ds.initialize(
            model=modules[rank][1], config=config_of(stage, 2), mpu=mesh
        ).engine
        for [tokens] in batches(STEPS, 1, 2, rank):
            with torch.no_grad():
                wanted = teacher(tokens)
            student.backward(F.mse_loss(student(tokens), wanted))
            student.step()
        return weights(student)

    modules = [(make(Stack, seed=1), make(Stack)) for _ in range(2)]
    teacher, plain = make(Stack, seed=1), make(Stack)
    loss = lambda module, tokens: F.mse_loss(module(tokens), teacher(tokens).detach())
    train_plainly(
        plain, loss, batches(STEPS, 1, 2), lr=0.01, eps=EPS, clip=0.5, weight_decay=0.1
    )
    assert_trained_as(run_ranks(2, main), plain)


# ------------------------------------------------------------------------------------- one after the other
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_engine_of_a_module_ends_the_first_and_starts_from_its_weights(
    stage, caplog
):
    def main(engine, rank):
        train(engine, rank, 2)
        second = megatron_ds.initialize(
            model=engine.module, config=config_of(stage, 2), mpu=engine.world.mesh
        ).engine
        with pytest.raises(MegatronDSError, match="trains no more"):
            engine.backward(loss_of(engine, batches(1, 1, 2, rank)[0][0]))
        train(second, rank, 2)
        return weights(second)

    plain = make(Stack)
    for _ in range(2):  # two optimizers, each with a state of its own
        train_plainly(
            plain,
            loss_of,
            batches(2, 1, 2),
            lr=0.01,
            eps=EPS,
            clip=0.5,
            weight_decay=0.1,
        )
    found = on_ranks(2, main, lambda: make(Stack), config_of(stage, 2))
    assert_trained_as(found, plain)
    assert ["which is destroyed" in line for line in caplog.messages] == [True]


def test_a_module_whose_engine_is_gone_is_told_on_all_ranks():
    def main(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        start = lambda: megatron_ds.initialize(
            model=modules[rank], config=config_of(3, 2), mpu=mesh
        )
        engine = start().engine
        if rank == 1:
            for p in modules[rank].parameters():
                p.engine = lambda: None  # a weak reference whose object is gone
        with pytest.raises(MegatronDSError, match="an engine that is gone"):
            start()
        return engine.global_steps

    modules = [make(Stack) for _ in range(2)]
    assert run_ranks(2, main) == [0, 0]
