"""A module that a program changes after `initialize`: frozen, unfrozen, replaced, added and tied parameters."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from megatron_ds.errors import CallError
from tests.harness.engine_runs import make, on_ranks, weights

pytestmark = pytest.mark.threads

WIDTH, RANKS, ACCUMULATION, STEPS = 5, 2, 2, 7
MASTERS = {"bf16": {"enabled": True}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))


def begun_frozen():
    net = make(Net)
    net.body.requires_grad_(False)
    return net


def inputs(step, microbatch, rank):
    seed = 100 * step + 10 * microbatch + rank
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(module, x):
    dtype = next(module.parameters()).dtype
    return (module(x.to(dtype)).float() - 1).square().mean()


def between_updates(net, step, microbatch):
    """The head alone at first, then all; the middle is frozen for two updates."""
    if microbatch == 0:
        net.body.requires_grad_(step >= 2)
        net.middle.requires_grad_(step not in (3, 4))


def within_updates(net, step, microbatch):
    """In the middle of an update `body` begins to be trained, and `middle`, which has a gradient, is frozen."""
    if (step, microbatch) == (2, 1):
        net.body.requires_grad_(True)
        net.middle.requires_grad_(False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-4)


OPTIMIZERS = {
    "adamw": adamw,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
}


def plainly(change, optimizer, steps=STEPS):
    """The weights after each step of one process of torch, on the data of all ranks."""
    net = begun_frozen()
    trained_by = optimizer(net.parameters())
    found = []
    for step in range(steps):
        for microbatch in range(ACCUMULATION):
            change(net, step, microbatch)
            for rank in range(RANKS):
                loss = loss_of(net, inputs(step, microbatch, rank))
                (loss / ACCUMULATION / RANKS).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        trained_by.step()
        trained_by.zero_grad()
        found.append({n: p.detach().clone() for n, p in net.named_parameters()})
    return found


def train(engine, rank, change, steps=range(STEPS)):
    found = []
    for step in steps:
        for microbatch in range(ACCUMULATION):
            change(engine.module, step, microbatch)
            engine.backward(loss_of(engine, inputs(step, microbatch, rank)))
            engine.step()
        found.append(weights(engine))
    return found


def config_of(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.2,
        "zero_optimization": {"stage": stage},
        **more,
    }


JSON_ADAMW = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
    }
}


def assert_equal(found, expected):
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, value in theirs.items():
            # the order of the sums over ranks and micro-batches differs
            torch.testing.assert_close(
                ours[name],
                value,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, at=(step, name): f"{at}: {m}",
            )


@pytest.mark.parametrize("change", [between_updates, within_updates])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stage_0_trains_what_torch_trains(name, change):
    optimizer = OPTIMIZERS[name]
    results = on_ranks(
        RANKS,
        partial(train, change=change),
        begun_frozen,
        config_of(0),
        optimizer=optimizer,
    )
    for found in results:
        assert_equal(found, plainly(change, optimizer))


def test_the_optimizer_of_the_json_trains_what_torch_trains():
    results = on_ranks(
        RANKS,
        partial(train, change=between_updates),
        begun_frozen,
        config_of(0, **JSON_ADAMW),
    )
    for found in results:
        assert_equal(found, plainly(between_updates, adamw))


def test_masters_of_bf16_weights_outlive_an_unfreezing():
    """The head's masters and moments move to other buffers; the head goes on as in a run without the body."""

    def main(engine, rank, change):
        return train(engine, rank, change)[-1], engine.optimizer.missed

    never = lambda net, step, microbatch: None
    late = lambda net, step, microbatch: net.body.requires_grad_(step >= STEPS - 1)
    runs = {}
    for change in (never, late):
        config = config_of(0, **MASTERS, **JSON_ADAMW) | {"gradient_clipping": 0}
        [(after, missed), _] = on_ranks(
            RANKS, partial(main, change=change), begun_frozen, config
        )
        runs[change] = after
    assert missed == {"body.weight": STEPS - 1, "body.bias": STEPS - 1}
    assert not torch.equal(runs[late]["body.weight"], runs[never]["body.weight"])
    for name in ("middle.weight", "middle.bias", "head.weight", "head.bias"):
        assert torch.equal(runs[late][name], runs[never][name])


def test_a_parameter_that_begins_frozen_takes_memory_when_it_is_trained():
    def main(engine, rank):
        before = engine.zero.memory()
        train(engine, rank, between_updates, range(2))
        frozen = engine.zero.memory()
        train(engine, rank, between_updates, range(2, 3))
        return before, frozen, engine.zero.memory()

    body = WIDTH * WIDTH + WIDTH
    before, frozen, after = on_ranks(
        RANKS, main, begun_frozen, config_of(0), optimizer=adamw
    )[0]
    assert before == frozen
    assert after.optimizer - frozen.optimizer >= 2 * 4 * body


@pytest.mark.parametrize("saved_at", [2, 4, 6])
def test_a_run_with_frozen_parameters_continues_from_its_checkpoint(tmp_path, saved_at):
    """Moments and counts of steps of parameters that are frozen when the run begins again are there, too."""

    def first(engine, rank):
        train(engine, rank, between_updates, range(saved_at))
        engine.save_checkpoint(tmp_path)

    def second(engine, rank):
        engine.load_checkpoint(tmp_path)
        return train(engine, rank, between_updates, range(saved_at, STEPS))

    options = dict(optimizer=adamw)
    on_ranks(RANKS, first, begun_frozen, config_of(0), **options)
    results = on_ranks(RANKS, second, begun_frozen, config_of(0), **options)
    for found in results:
        assert_equal(found, plainly(between_updates, adamw)[saved_at:])


# ------------------------------------------------------------------ what is refused
def refused(engine, rank, change):
    """The error of the update after the change; those before it are made."""
    train(engine, rank, lambda *_: None, range(1))
    change(engine.module, rank)
    before = weights(engine) if engine.zero_optimization_stage() < 3 else {}
    with pytest.raises(CallError) as error:
        train(engine, rank, lambda *_: None, range(1, 2))
    for name, value in before.items():
        now = dict(engine.module.named_parameters())[name]
        assert torch.equal(now, value), f"{name} was updated"
    return str(error.value)


def unfreeze(net, rank):
    net.body.requires_grad_(True)


def freeze(net, rank):
    net.middle.requires_grad_(False)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "change, sentence",
    [
        (unfreeze, "body.weight was frozen at initialize and is trained"),
        (freeze, "middle.bias was trained at initialize and is frozen"),
    ],
)
def test_other_stages_refuse_it_by_name(stage, change, sentence):
    messages = on_ranks(
        RANKS,
        partial(refused, change=change),
        begun_frozen,
        config_of(stage),
        optimizer=adamw,
    )
    for message in messages:
        assert sentence in message and "stage 0" in message


def test_ranks_that_freeze_different_parameters_all_end():
    def main(engine, rank):
        return refused(
            engine, rank, lambda net, rank: net.middle.requires_grad_(rank == 1)
        )

    messages = on_ranks(RANKS, main, begun_frozen, config_of(0), optimizer=adamw)
    for message in messages:
        assert "middle.bias is frozen on rank 0" in message


def replace(net, rank):
    net.middle.weight = nn.Parameter(net.middle.weight.detach().clone())


def add(net, rank):
    net.further = nn.Linear(2, 2)


def remove(net, rank):
    net.middle.bias = None


def tie(net, rank):
    net.body.bias = net.other_bias = net.further_bias


def untie(net, rank):
    net.other_bias = nn.Parameter(torch.zeros(WIDTH))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.other_bias = self.body.bias
        self.further_bias = nn.Parameter(torch.zeros(WIDTH))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "change, sentence",
    [
        (replace, "middle.weight was replaced after initialize"),
        (add, "further.weight was added after initialize"),
        (remove, "middle.bias is no longer in the module"),
        (untie, "other_bias was replaced after initialize"),
    ],
)
def test_changes_of_the_parameters_themselves_are_refused(stage, change, sentence):
    messages = on_ranks(
        RANKS,
        partial(refused_in_gradients, change=change),
        partial(make, Tied),
        config_of(stage),
        optimizer=adamw,
    )
    for message in messages:
        assert sentence in message


def refused_in_gradients(engine, rank, change):
    train(engine, rank, lambda *_: None, range(1))
    change(engine.module, rank)
    with pytest.raises(CallError) as error:
        train(engine, rank, lambda *_: None, range(1, 2))
    return str(error.value)


def test_a_tie_that_is_made_later_is_refused():
    messages = on_ranks(
        RANKS,
        partial(refused_in_gradients, change=tie),
        partial(make, Tied),
        config_of(0),
        optimizer=adamw,
    )
    for message in messages:
        assert "body.bias is tied to further_bias since initialize" in message


def test_modules_that_are_wrapped_are_no_change():
    """The parameters are the same objects under other names."""

    def main(engine, rank):
        net = engine.module
        train(engine, rank, lambda *_: None, range(1))
        net.middle = nn.Sequential(net.middle)
        return train(engine, rank, lambda *_: None, range(1, 3))[-1]

    for found in on_ranks(
        RANKS, main, partial(make, Net), config_of(0), optimizer=adamw
    ):
        assert all(math.isfinite(p.sum()) for p in found.values())


def test_a_parameter_of_no_group_that_is_unfrozen_is_named(caplog):
    def main(engine, rank):
        before = engine.module.body.weight.detach().clone()
        unfreeze(engine.module, rank)
        train(engine, rank, lambda *_: None, range(2))
        return torch.equal(engine.module.body.weight.detach(), before)

    trained = lambda parameters: adamw([p for p in parameters if p.requires_grad])
    results = on_ranks(RANKS, main, begun_frozen, config_of(0), optimizer=trained)
    assert results == [True] * RANKS
    assert "are in no group of the optimizer" in caplog.text
    assert "body.weight" in caplog.text
