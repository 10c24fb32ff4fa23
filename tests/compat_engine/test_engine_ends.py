"""The user's module beside its engine: copies, torch's zero_grad, resized parameters, `destroy`, old
names."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatron_ds
from megatron_ds.compat.engine import module_specs, module_values
from megatron_ds.compat.engine.zero_init import Partition, partitions_of
from megatron_ds.errors import ConfigError, MegatronDSError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    STEPS,
    Odd,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    weights,
)
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(p, expected[name]) for name, p in found.items()
    )


@STAGES
@pytest.mark.parametrize("place", ["before", "backward", "step"])
@pytest.mark.parametrize("caller", ["module", "around"])
def test_torchs_zero_grad_of_the_module_is_that_of_the_engine(stage, place, caller):
    def main(engine, rank):
        module = (
            engine.module
            if caller == "module"
            else nn.ModuleDict({"inner": engine.module})
        )
        for microbatches in batches(STEPS, 2, 2, rank):
            for tokens in microbatches:
                module.zero_grad() if place == "before" else None
                engine.backward(loss_of(engine, tokens))
                module.zero_grad(set_to_none=rank == 0) if place == "backward" else None
                engine.step()
                module.zero_grad() if place == "step" else None
        return weights(engine)

    config = config_of(stage, 2, accumulation=2)
    plainly = lambda engine, rank: (train(engine, rank), weights(engine))[1]
    expected = on_ranks(2, plainly, lambda: make(Stack), config)
    for found, wanted in zip(on_ranks(2, main, lambda: make(Stack), config), expected):
        assert same(found, wanted)


def test_torchs_zero_grad_of_a_part_zeroes_it_where_gradients_are_whole():
    def main(engine, rank):
        engine.backward(loss_of(engine, batches(1, 1, 2, rank)[0][0]))
        engine.module.head.zero_grad()
        return (
            engine.module.head.weight.grad.any().item(),
            engine.module.norm.weight.grad.any().item(),
        )

    assert (
        on_ranks(2, main, lambda: make(Stack), config_of(0, 2)) == [(False, True)] * 2
    )


@STAGES
@pytest.mark.parametrize("bf16", [False, True])
def test_a_copy_of_the_module_is_a_plain_module_with_its_weights(stage, bf16):
    def main(engine, rank):
        train(engine, rank, 1)
        if stage == 3:
            with pytest.raises(
                ConfigError, match=r"Copy it inside of `with engine.gathered_parameters"
            ):
                copy.deepcopy(engine.module)
        with engine.gathered_parameters():
            other = copy.deepcopy(engine.module)
        before = {name: p.detach().clone() for name, p in other.named_parameters()}
        kinds = {type(p) for p in other.parameters()} | {
            type(m._parameters) for m in other.modules()
        }
        shown = same(before, weights(engine))
        train(engine, rank, 1, first=1)
        loss = loss_of(other, batches(1, 1, 2, rank)[0][0])
        loss.backward()
        trained = all(
            p.grad is not None
            for name, p in other.named_parameters()
            if p.requires_grad and "unused" not in name
        )
        return (
            shown,
            trained,
            same(before, dict(other.named_parameters())),
            kinds == {nn.Parameter, dict},
        )

    more = {"bf16": {"enabled": True}} if bf16 else {}
    kind = Stack if bf16 else Odd
    assert (
        on_ranks(2, main, lambda: make(kind), config_of(stage, 2, **more))
        == [(True,) * 4] * 2
    )


@STAGES
def test_after_destroy_the_module_is_a_plain_one_and_may_be_trained_again(stage):
    def main(engine, rank):
        train(engine, rank, 2)
        trained, module = weights(engine), engine.module
        engine.destroy()
        engine.destroy()
        with pytest.raises(MegatronDSError, match="destroy"):
            engine.step()
        values = same(dict(module.named_parameters()), trained)
        hooks = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()
        )
        optimizer = torch.optim.SGD(
            [p for p in module.parameters() if p.requires_grad], lr=0.1
        )
        loss_of(module, batches(1, 1, 2, rank)[0][0]).backward()
        optimizer.step()
        changed = not same(dict(module.named_parameters()), trained)
        mesh = engine.world
        return (
            values,
            hooks,
            changed,
            {type(p) for p in module.parameters()} == {nn.Parameter},
            mesh.data.size,
        )

    assert (
        on_ranks(2, main, lambda: make(Odd), config_of(stage, 2))
        == [(True, 0, True, True, 2)] * 2
    )


def test_the_throughput_timer_counts():
    def main(engine, rank):
        train(engine, rank, 4)
        timer = engine.tput_timer
        counts = (
            timer.micro_step_count,
            timer.global_step_count,
            timer.avg_samples_per_sec() > 0,
        )
        timer.update_epoch_count()
        return *counts, timer.epoch_count, timer.micro_step_count

    assert (
        on_ranks(2, main, lambda: make(Stack), config_of(1, 2, accumulation=2))
        == [(8, 4, True, 1, 0)] * 2
    )


@pytest.mark.rest
@STAGES
def test_checkpoints_with_the_names_of_compiled_modules_are_loaded(
    stage, tmp_path, monkeypatch
):
    compiled = lambda: torch.compile(make(Stack), backend="eager")

    def first(engine, rank):
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return train(engine, rank, 1, first=2), engine.full_state_dict()

    def second(engine, rank):
        engine.load_checkpoint(tmp_path)
        return train(engine, rank, 1, first=2), engine.full_state_dict()

    with monkeypatch.context() as patch:  # as this package was before
        patch.setattr(module_specs, "name_of", lambda path: path)
        patch.setattr(module_values, "name_of", lambda path: path)
        norms, saved = on_ranks(2, first, compiled, config_of(stage, 2))[0]
    assert all(name.startswith("_orig_mod.") for name in saved)
    for model in (compiled, lambda: make(Stack, seed=5)):
        other_norms, found = on_ranks(2, second, model, config_of(stage, 2))[0]
        assert norms == other_norms
        assert same(
            found,
            {name.removeprefix("_orig_mod."): value for name, value in saved.items()},
        )


# ---------------------------------------------------------------------------------------- resized parameters
class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def resize(module, rows):
    """Give the parameters other data, and keep the objects, which transformers does, too."""
    for p in {module.embed.weight: 0, module.head.weight: 0}:
        old = p.data
        p.data = torch.full((rows, 4), 9.0, device=old.device)
        p.data[:7] = old


def in_shards(rank, world, tied, seed=3):
    module, mesh = Tied(tied), Mesh(Grid.fit(2), rank, world.connect)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.arange(28.0).view(7, 4) + 100 * i)
    for p in module.parameters():
        Partition(p, mesh.group("dp"), None)
    return module, mesh


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_zero_init_are_resized_while_they_are_gathered(tied):
    def main(rank, world):
        module, mesh = in_shards(rank, world, tied)
        with megatron_ds.zero.GatheredParameters(
            list(module.parameters()), modifier_rank=0
        ):
            resize(module, 10)
            module.embed.weight.data[9] += rank  # rank 0's values count
        engine, *_ = megatron_ds.initialize(
            model=module, config=config_of(3, 2), mpu=mesh
        )
        return engine.full_state_dict()

    found = run_ranks(2, main)[0]
    expected = torch.cat([torch.arange(28.0).view(7, 4), torch.full((3, 4), 9.0)])
    assert torch.equal(found["embed.weight"], expected)
    head = expected.clone()
    head[:7] += 0 if tied else 100
    assert torch.equal(found["head.weight"], head)


def test_resizing_that_would_lose_values_is_an_error():
    def main(rank, world):
        module, mesh = in_shards(rank, world, False)
        with pytest.raises(
            ConfigError, match="without modifier_rank=.*resize_token_embeddings"
        ):
            with megatron_ds.zero.GatheredParameters(list(module.parameters())):
                resize(module, 10)
        assert module.embed.weight.shape == (7, 4)
        with megatron_ds.zero.GatheredParameters(module.embed.weight, modifier_rank=0):
            resize(module, 10)  # the head is not gathered
        with pytest.raises(
            ConfigError, match=r"head.weight was made under zero.Init with the shape"
        ):
            megatron_ds.initialize(model=module, config=config_of(3, 2), mpu=mesh)
        module.head = nn.Linear(4, 10, bias=False, device="meta")
        with pytest.raises(ConfigError, match="have no values, first head.weight"):
            megatron_ds.initialize(model=module, config=config_of(3, 2), mpu=mesh)
        return len(partitions_of(module))

    assert run_ranks(2, main) == [1, 1]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engines_parameters_cannot_be_resized(stage):
    def main(engine, rank):
        with pytest.raises(
            ConfigError, match="head.weight, were resized|embed.weight, were resized"
        ):
            with engine.gathered_parameters(modifier_rank=0):
                engine.module.embed.weight.data = F.pad(
                    engine.module.embed.weight.data, (0, 0, 0, 2)
                )

    on_ranks(2, main, lambda: make(Stack), config_of(stage, 2))
