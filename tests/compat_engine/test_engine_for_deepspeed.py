"""An engine as programs written for DeepSpeed use it: its arguments, its tuple, its loop, several engines in
one program."""

import argparse
import contextvars
import json

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.engine.initialization import _take_local_rank
from megatron_ds.errors import ConfigError, MegatronDSError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    EPS,
    SAMPLES,
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

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
PLAIN = {"lr": 0.01, "eps": EPS, "clip": 0.5, "weight_decay": 0.1}
alone = lambda: Mesh(Grid(), 0)


def one(model=None, config=CONFIG, **options):
    return megatron_ds.initialize(
        model=model or nn.Linear(3, 2), config=config, mpu=alone(), **options
    ).engine


# ------------------------------------------------------------------------------------------------- initialize
def test_arguments_come_in_deepspeeds_order_and_the_tuple_too(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = megatron_ds.add_config_arguments(argparse.ArgumentParser()).parse_args(
        ["--deepspeed_config", str(path)]
    )
    module, data = nn.Linear(3, 2), [torch.ones(3)] * 8
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine, found, loader, found_scheduler = megatron_ds.initialize(
        args, module, optimizer, None, data, scheduler, 29500, alone(), None, None
    )
    assert engine.module is module and found.param_groups is optimizer.param_groups
    assert (
        len(loader) == 2
        and loader is engine.training_dataloader
        and found_scheduler is scheduler
    )
    for other in (
        {"config_params": CONFIG},
        {"config": json.dumps(CONFIG)},
        {"config": path},
    ):
        assert (
            megatron_ds.initialize(
                model=nn.Linear(2, 2), mpu=alone(), **other
            ).engine.config
            == CONFIG
        )


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "there is no configuration. Give config="),
        (
            {"config": CONFIG, "config_params": CONFIG},
            "given 2 times, as config and as config_params",
        ),
        (
            {"config": CONFIG, "args": argparse.Namespace(deepspeed_config="x.json")},
            "as config and as args.deepspeed_config",
        ),
        ({"config": "{nonsense"}, "begins with { but is not JSON"),
        ({"config": CONFIG, "mesh_param": (2, 2)}, "does not split sequences"),
        ({"config": CONFIG, "optimizer": 3}, "optimizer is int"),
        (
            {"config": CONFIG | {"dataloader_drop_last": "yes"}},
            "\"dataloader_drop_last\" is 'yes'",
        ),
        (
            {
                "config": CONFIG,
                "optimizer": lambda p: torch.optim.SGD(p, lr=1),
                "decay": lambda n, p: True,
            },
            "Give one of them",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options, says):
    with pytest.raises(ConfigError) as error:
        megatron_ds.initialize(model=nn.Linear(2, 2), mpu=alone(), **options)
    assert says in str(error.value)


def test_a_tuple_that_was_not_unpacked_says_so():
    result = megatron_ds.initialize(model=nn.Linear(3, 2), config=CONFIG, mpu=alone())
    for use in (
        lambda: result(torch.ones(3)),
        lambda: result.backward(0),
        lambda: result.module,
    ):
        with pytest.raises(
            (TypeError, AttributeError), match=r"Unpack it: engine, optimizer"
        ):
            use()


def test_the_local_rank_of_old_launchers_is_taken(monkeypatch):
    env = {"RANK": "3", "WORLD_SIZE": "8"}
    monkeypatch.setattr("os.environ", env)
    for args in (
        argparse.Namespace(local_rank=3),
        argparse.Namespace(local_rank=-1),
        None,
    ):
        _take_local_rank(args)
    assert env == {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    with pytest.raises(
        ConfigError, match="--local-rank 1, but LOCAL_RANK is 3 in the environment"
    ):
        _take_local_rank(argparse.Namespace(local_rank=1))


def test_the_programs_flags_may_have_a_local_rank_already():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = megatron_ds.add_config_arguments(parser).parse_args(
        ["--deepspeed", "--local_rank", "2"]
    )
    assert (args.deepspeed, args.deepspeed_config, args.local_rank) == (True, None, 2)


def test_a_process_group_that_should_be_there_is_asked_for(monkeypatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    start = lambda: megatron_ds.initialize(
        model=nn.Linear(2, 2), config=CONFIG, dist_init_required=False
    )
    with pytest.raises(
        ConfigError, match="dist_init_required=False, but there is no process group"
    ):
        contextvars.Context().run(start)  # other tests may have left a mesh in this one


# --------------------------------------------------------------------------------------------- a torch module
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config, self.device = (
            nn.Linear(3, 2),
            "the module's",
            "elsewhere",
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.linear(x)

    def generate(self, n):
        return [self.seen.item()] * n


def test_an_engine_is_a_torch_module_that_passes_attributes_through():
    engine = one(Named())
    assert isinstance(engine, nn.Module)
    assert [name for name, _ in engine.named_parameters()] == [
        "module.linear.weight",
        "module.linear.bias",
    ]
    assert (
        list(engine.parameters())[0]
        is engine.module.linear.weight
        is engine.linear.weight
    )
    assert engine.generate(2) == [0.0, 0.0] and engine.module.config == "the module's"
    # names that both have are the engine's
    assert engine.config == CONFIG and engine.device == torch.device("cpu")
    with pytest.raises(
        AttributeError,
        match="neither the engine nor its module, Named, has an attribute 'no_such'",
    ):
        _ = engine.no_such
    assert (
        engine.train() is engine
        and engine.training
        and not engine.eval().training
        and not engine.module.linear.training
    )
    calls = []
    handle = engine.register_forward_hook(lambda *_: calls.append(1))
    x = torch.ones(4, 3)
    assert (
        torch.equal(engine(x), engine.module(x))
        and torch.equal(engine.forward(x), engine(x))
        and len(calls) == 2
    )
    handle.remove()
    assert engine.to("cpu") is engine and engine.float() is engine
    with pytest.raises(
        ConfigError, match="are torch.float32 on cpu and cannot be moved"
    ):
        engine.half()


@pytest.mark.parametrize(
    "stage, more",
    [
        (1, {}),
        (2, {"bf16": {"enabled": True}}),
        (3, {}),
        (3, {"bf16": {"enabled": True}}),
    ],
)
def test_the_state_dict_is_that_of_the_module_and_loads_into_masters(stage, more):
    def main(engine, rank):
        values = make(Stack, seed=9).state_dict()
        engine.load_state_dict(values)
        masters = {
            p.spec.name: p.tensor
            for p in engine.optimizer.pieces()
            if p.kind == "weight"
        }
        for piece in engine.optimizer.pieces():
            if piece.kind == "weight":
                assert torch.equal(masters[piece.spec.name][:3], piece.tensor[:3])
                whole = values[piece.spec.name].flatten()[piece.start : piece.stop]
                assert torch.equal(
                    piece.tensor, whole.to(next(engine.parameters()).dtype).float()
                )
        if stage == 3:
            with pytest.raises(ConfigError, match="no rank holds whole parameters"):
                engine.state_dict()
        with engine.gathered_parameters():
            found = {name: value.clone() for name, value in engine.state_dict().items()}
        assert found.keys() == values.keys()
        assert all(
            torch.equal(found[name].float(), value.to(found[name].dtype).float())
            for name, value in values.items()
        )

    on_ranks(2, main, lambda: make(Stack), config_of(stage, 2, **more))


def test_what_deepspeeds_users_ask_is_answered():
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.7,
        "steps_per_print": 5,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.9]}},
    }

    def main(engine, rank):
        return (
            engine.get_batch_info(),
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.zero_optimization(),
            engine.zero_optimization_stage(),
            engine.fp16_enabled(),
            engine.bfloat16_enabled(),
            engine.dynamic_loss_scale(),
            engine.loss_scale(),
            engine.gradient_clipping(),
            engine.steps_per_print(),
            engine.wall_clock_breakdown(),
            engine.get_lr(),
            engine.get_mom(),
            engine.get_global_grad_norm(),
            engine.world_size,
            engine.global_rank,
            engine.local_rank,
            engine.dp_world_size,
            (
                engine.global_steps,
                engine.global_samples,
                engine.micro_steps,
                engine.skipped_steps,
            ),
        )

    for rank, found in enumerate(on_ranks(2, main, lambda: make(Stack), config)):
        assert found == (
            (12, 2, 3),
            12,
            2,
            3,
            True,
            2,
            True,
            False,
            True,
            65536.0,
            0.7,
            5,
            False,
            [0.25],
            [(0.8, 0.9)],
            None,
            2,
            rank,
            0,
            2,
            (0, 0, 0, 0),
        )


# --------------------------------------------------------------------------------------------------- the loop
@pytest.mark.parametrize(
    "stage, ranks", [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 1)]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_several_backwards_of_a_microbatch_add_up(stage, ranks, accumulation):
    """Each backward has its own graph, or two share one that is retained; the module calls a layer twice."""

    def main(engine, rank):
        for microbatches in batches(STEPS, accumulation, ranks, rank):
            for tokens in microbatches:
                loss = loss_of(engine, tokens)
                returned = engine.backward(loss, retain_graph=True)
                assert returned.item() == pytest.approx(loss.item() / accumulation)
                engine.backward(2 * loss)
                engine.backward(loss_of(engine, tokens.flip(1)))
                engine.step()
        assert (
            engine.micro_steps == STEPS * accumulation
            and engine.global_samples == STEPS * SAMPLES
        )
        return weights(engine)

    plain = make()
    both = lambda module, tokens: (
        3 * loss_of(module, tokens) + loss_of(module, tokens.flip(1))
    )
    train_plainly(plain, both, batches(STEPS, accumulation, ranks), **PLAIN)
    assert_trained_as(
        on_ranks(ranks, main, make, config_of(stage, ranks, accumulation)), plain
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_accumulates_on_each_rank(stage):
    def main(engine, rank):
        for microbatches in batches(STEPS, 2, 2, rank):
            with engine.no_sync():
                engine.backward(loss_of(engine, microbatches[0]) / 2)
                with pytest.raises(MegatronDSError, match="inside of engine.no_sync"):
                    engine.step()
            engine.backward(loss_of(engine, microbatches[1]) / 2)
            engine.step()
        return weights(engine)

    plain = make(Stack)
    train_plainly(plain, loss_of, batches(STEPS, 2, 2), **PLAIN)
    assert_trained_as(
        on_ranks(2, main, lambda: make(Stack), config_of(stage, 2)), plain
    )


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_losses_in_no_sync_are_divided_by_the_accumulation_steps(stage, by_torch):
    """DeepSpeed 0.19.8 divides them, too."""

    def main(engine, rank):
        engine.set_gradient_accumulation_boundary(True)
        run = torch.Tensor.backward if by_torch else engine.backward
        for microbatches in batches(STEPS, 2, 2, rank):
            with engine.no_sync():
                run(loss_of(engine, microbatches[0]))
            run(loss_of(engine, microbatches[1]))
            engine.step()
        return weights(engine)

    plain = make(Stack)
    train_plainly(plain, loss_of, batches(STEPS, 2, 2), **PLAIN)
    assert_trained_as(
        on_ranks(2, main, lambda: make(Stack), config_of(stage, 2, 2)), plain
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_the_program_may_choose_the_boundary_itself(stage):
    """Accelerate calls step after the last micro-batch only."""

    def main(engine, rank):
        for microbatches in batches(STEPS, 3, 2, rank):
            for i, tokens in enumerate(microbatches):
                engine.set_gradient_accumulation_boundary(i == 2)
                engine.backward(loss_of(engine, tokens))
                if i == 2:
                    engine.step()
        return weights(engine), engine.global_steps

    plain = make(Stack)
    train_plainly(plain, loss_of, batches(STEPS, 3, 2), **PLAIN)
    results = on_ranks(2, main, lambda: make(Stack), config_of(stage, 2, 3))
    assert_trained_as([found for found, _ in results], plain)
    assert [steps for _, steps in results] == [STEPS, STEPS]


def test_no_sync_is_refused_where_gradients_are_sharded():
    for stage in (2, 3):
        engine = one(config=CONFIG | {"zero_optimization": {"stage": stage}})
        with (
            pytest.raises(
                AssertionError, match=f"ZeRO stage {stage}: .* this stage shards them"
            ),
            engine.no_sync(),
        ):
            pass


def test_another_batch_size_means_other_accumulation():
    def main(engine, rank):
        train(engine, rank, 1)
        with pytest.raises(ConfigError, match="14 is not a multiple of 12"):
            engine.set_train_batch_size(14)
        engine.set_train_batch_size(24)
        for tokens in batches(1, 1, 2, rank)[0] * 2:
            engine.backward(loss_of(engine, tokens))
            with pytest.raises(ConfigError, match="in the middle of an update"):
                engine.set_train_batch_size(12)
            engine.step()
        return engine.get_batch_info(), engine.global_steps, engine.global_samples

    assert (
        on_ranks(2, main, lambda: make(Stack), config_of(1, 2))
        == [((24, 6, 2), 2, 36)] * 2
    )


def test_another_microbatch_means_another_batch():
    engine = one(config=CONFIG | {"gradient_accumulation_steps": 2})
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (6, 3, 2)
    with pytest.raises(ConfigError, match="micro_batch_size=0"):
        engine.set_train_micro_batch_size(0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_are_discarded_leave_nothing_behind(stage):
    def main(engine, rank):
        tokens = batches(1, 2, 2, rank)[0][0]
        engine.backward(1e3 * loss_of(engine, tokens))
        engine.step()
        engine.discard_gradients()
        engine.backward(1e3 * loss_of(engine, tokens))
        engine.discard_gradients()
        return train(engine, rank), weights(engine)

    config = config_of(stage, 2, accumulation=2)
    expected = on_ranks(
        2,
        lambda engine, rank: (train(engine, rank), weights(engine)),
        lambda: make(Stack),
        config,
    )
    for (norms, found), (other_norms, other) in zip(
        on_ranks(2, main, lambda: make(Stack), config), expected
    ):
        assert norms == other_norms and all(
            torch.equal(p, other[name]) for name, p in found.items()
        )


# ---------------------------------------------------------------------------------------------------- data
def test_the_loader_gives_each_rank_other_samples_of_a_microbatch():
    data = [(torch.full((2,), float(i)), i) for i in range(11)]
    config = CONFIG | {"train_batch_size": 8, "gradient_accumulation_steps": 2}

    def main(rank, world):
        result = megatron_ds.initialize(
            model=nn.Linear(2, 2),
            training_data=data,
            config=config | {"dataloader_drop_last": drop},
            mpu=Mesh(Grid.fit(2), rank, world.connect),
            collate_fn=lambda samples: [i for _, i in samples],
        )
        loader = result.training_dataloader
        repeating = megatron_ds.RepeatingLoader(loader)
        epochs = [
            list(loader),
            list(loader),
            [next(repeating) for _ in range(len(loader) + 1)],
        ]
        loader.set_epoch(1)
        own = result.engine.deepspeed_io(data, batch_size=5)
        return epochs, list(loader), len(loader), [len(labels) for _, labels in own]

    for drop in (False, True):
        (epochs, other, count, sizes), (theirs, *_) = run_ranks(2, main)
        assert count == (3 if not drop else 3) and sizes == (
            [5, 1] if not drop else [5]
        )
        assert (
            epochs[0] == epochs[1] == epochs[2][:count]
            and epochs[2][count] == epochs[0][0]
            and other != epochs[0]
        )
        assert all(len(batch) == 2 for batch in epochs[0])
        assert sorted({i for batch in epochs[0] + theirs[0] for i in batch}) == list(
            range(11)
        )
        expected = iter(torch.utils.data.DistributedSampler(data, 2, 0))
        assert [i for batch in epochs[0] for i in batch] == list(
            expected
        )  # torch's order, as DeepSpeed's
