"""Optimizers, parameter groups and schedulers of the user's own, under ZeRO, against torch alone in one
process."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    StepLR,
)

import megatron_ds
from megatron_ds.errors import CallError, CheckpointError, ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    STEPS,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    weights,
)
from tests.harness.plain_optimizers import PlainLamb, PlainLion
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2, together=True)]

PARTS = [(0, 1), (0, 2), (1, 2), (2, 2), (3, 1), (3, 2)]  # stages and ranks


def two_groups(module, **more):
    """Matrices decay, the others do not and learn faster."""
    split = lambda is_matrix: [
        p for p in module.parameters() if (p.dim() > 1) is is_matrix
    ]
    return [
        {"params": split(True), "weight_decay": 0.2},
        {"params": split(False), "lr": 0.03, **more},
    ]


ADAMW = lambda module: torch.optim.AdamW(
    two_groups(module, betas=(0.5, 0.9)), lr=0.01, eps=1e-4, weight_decay=0
)
OPTIMIZERS = {
    "AdamW": ADAMW,
    "SGD": lambda module: torch.optim.SGD(
        two_groups(module), lr=0.1, momentum=0.9, nesterov=True
    ),
    "SGD with dampening": lambda module: torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, dampening=0.5
    ),
    "Adagrad": lambda module: torch.optim.Adagrad(
        two_groups(module), lr=0.05, initial_accumulator_value=0.1
    ),
    "RMSprop": lambda module: torch.optim.RMSprop(
        two_groups(module), lr=0.01, eps=1e-3, momentum=0.5, centered=True
    ),
    "Rprop": lambda module: torch.optim.Rprop(module.parameters(), lr=0.01),
    "RAdam": lambda module: torch.optim.RAdam(two_groups(module), lr=0.01, eps=1e-4),
    "amsgrad": lambda module: torch.optim.Adam(
        two_groups(module), lr=0.01, eps=1e-4, amsgrad=True
    ),
}


def plainly(
    optimizer,
    scheduler=None,
    *,
    steps=STEPS,
    accumulation=1,
    ranks=1,
    change=None,
    clip=0.5,
):
    """(the module trained by torch alone, the learning rates of all steps)"""
    module, rates = make(Stack), []
    optimizer = optimizer(module)
    scheduler = scheduler and scheduler(optimizer)
    for step, microbatches in enumerate(batches(steps, accumulation, ranks)):
        if change:
            change(step, optimizer)
        optimizer.zero_grad()
        for tokens in microbatches:
            (loss_of(module, tokens) / len(microbatches)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if scheduler:
            scheduler.step()
    return module, rates


def on_ranks(ranks, main, config, **options):
    """main(rank, the tuple) on every rank; options: functions of the module."""
    modules = [make(Stack) for _ in range(ranks)]

    def run(rank, world):
        given = {name: option(modules[rank]) for name, option in options.items()}
        return main(
            rank,
            megatron_ds.initialize(
                model=modules[rank],
                config=config,
                **given,
                mpu=Mesh(Grid.fit(ranks), rank, world.connect),
            ),
        )

    return run_ranks(ranks, run)


def train(rank, initialized, steps=STEPS, first=0, change=None):
    """The learning rates of all steps, and the weights."""
    engine, optimizer, _, _ = initialized
    rates, accumulation = [], engine.gradient_accumulation_steps()
    for step, microbatches in list(
        enumerate(batches(first + steps, accumulation, engine.dp_world_size, rank))
    )[first:]:
        if change:
            change(step, optimizer)
        rates.append([group["lr"] for group in optimizer.param_groups])
        for tokens in microbatches:
            engine.backward(loss_of(engine, tokens))
            engine.step()
    return rates, weights(engine)


def without_optimizer(stage, ranks, accumulation=1, **more):
    config = config_of(stage, ranks, accumulation, **more)
    del config["optimizer"]
    return config


def assert_trained_as(results, expected, rates=None, rtol=1e-5, atol=2e-6):
    for found_rates, found in results:
        assert rates is None or found_rates == [
            pytest.approx(rate, rel=1e-12) for rate in rates
        ]
        for name, p in expected.named_parameters():
            torch.testing.assert_close(
                found[name],
                p.detach(),
                rtol=rtol,
                atol=atol,
                msg=lambda m, n=name: f"{n}: {m}",
            )


# ------------------------------------------------------------------------------------------ client optimizers
@pytest.mark.parametrize("stage, ranks", PARTS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_client_optimizer_trains_as_with_torch_alone(kind, stage, ranks):
    expected, rates = plainly(OPTIMIZERS[kind], accumulation=2, ranks=ranks)
    results = on_ranks(
        ranks, train, without_optimizer(stage, ranks, 2), optimizer=OPTIMIZERS[kind]
    )
    assert_trained_as(results, expected, rates)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"AdamW", "SGD"}))
def test_every_elementwise_optimizer_of_torch_will_do(kind):
    expected, _ = plainly(OPTIMIZERS[kind], ranks=2)
    # Rprop steps by the signs of gradients, some of which are zero but for rounding.
    tolerances = {"rtol": 1e-4, "atol": 2e-2} if kind == "Rprop" else {}
    assert_trained_as(
        on_ranks(2, train, without_optimizer(2, 2), optimizer=OPTIMIZERS[kind]),
        expected,
        **tolerances,
    )


def test_a_function_that_makes_the_optimizer_will_do_too():
    make_it = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    expected, _ = plainly(lambda module: make_it(module.parameters()))
    assert_trained_as(
        on_ranks(1, train, without_optimizer(1, 1), optimizer=lambda module: make_it),
        expected,
    )


def test_sixteen_bit_weights_get_a_client_optimizer_with_fp32_masters():
    config = without_optimizer(3, 2, bf16={"enabled": True})
    for _, found in on_ranks(2, train, config, optimizer=ADAMW):
        expected, _ = plainly(ADAMW, ranks=2)
        for name, p in expected.named_parameters():
            torch.testing.assert_close(
                found[name].float(), p.detach(), rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize(
    "make_it, says",
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            "LBFGS cannot be run on the shards",
        ),
        (
            lambda m: torch.optim.NAdam(m.parameters()),
            "NAdam keeps mu_product for each parameter",
        ),
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor"),
        (lambda m: Normalized(m.parameters(), lr=0.1), "Normalized is not elementwise"),
        (
            lambda m: torch.optim.SGD(make(Stack).parameters(), lr=0.1),
            "22 of the 22 parameters of optimizer= are not parameters",
        ),
        (lambda m: "SGD", "optimizer is str: give a torch optimizer"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(make_it, says):
    with pytest.raises(ConfigError, match=says):
        on_ranks(1, train, without_optimizer(1, 1), optimizer=make_it)


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm: needs whole tensors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.norm()
        return super().step(closure)


def test_an_optimizer_that_has_made_updates_is_refused():
    def used(module):
        optimizer = ADAMW(module)
        loss_of(module, torch.zeros(2, 5, dtype=torch.long)).backward()
        optimizer.step()
        return optimizer

    with pytest.raises(
        ConfigError, match="AdamW given as optimizer= has made updates already"
    ):
        on_ranks(1, train, without_optimizer(1, 1), optimizer=used)


def test_numbers_of_groups_may_be_changed_between_steps():
    def change(step, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.param_groups[1]["weight_decay"] = 0.3

    expected, rates = plainly(ADAMW, change=change)
    assert_trained_as(
        on_ranks(
            1, partial(train, change=change), without_optimizer(3, 1), optimizer=ADAMW
        ),
        expected,
        rates,
    )


def test_the_optimizer_is_stepped_by_the_engine_alone():
    def main(rank, initialized):
        engine, optimizer, _, _ = initialized
        assert (
            isinstance(optimizer, torch.optim.Optimizer)
            and optimizer is engine.optimizer
            and optimizer.cur_scale == 1
        )
        with pytest.raises(ConfigError, match="Call engine.step"):
            optimizer.step()
        with pytest.raises(ConfigError, match="cannot be added"):
            optimizer.add_param_group({"params": []})
        engine.backward(loss_of(engine, torch.zeros(2, 5, dtype=torch.long)))
        optimizer.zero_grad()
        assert engine.has_gradients  # those of an update stay
        engine.discard_gradients()
        assert not engine.has_gradients

    on_ranks(1, main, without_optimizer(1, 1), optimizer=ADAMW)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_state_dict_of_the_optimizer_brings_a_rank_back(stage):
    def main(rank, initialized):
        train(rank, initialized, 1)
        saved = initialized.optimizer.state_dict()
        rates, first = train(rank, initialized, 2, first=1)
        initialized.optimizer.param_groups[0]["lr"] = 7
        initialized.optimizer.load_state_dict(saved)
        again_rates, again = train(rank, initialized, 2, first=1)
        with pytest.raises(ConfigError, match="another layout"):
            initialized.optimizer.load_state_dict({**saved, "state": {}})
        return rates == again_rates and all(
            torch.equal(p, again[name]) for name, p in first.items()
        )

    assert on_ranks(2, main, without_optimizer(stage, 2), optimizer=ADAMW) == [
        True,
        True,
    ]


@pytest.mark.parametrize("stage, device", [(2, "cpu"), (3, "cpu"), (3, "nvme")])
def test_a_client_optimizer_updates_offloaded_state_too(stage, device, tmp_path):
    config = without_optimizer(stage, 2)
    config["zero_optimization"]["offload_optimizer"] = {"device": device} | (
        {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    )
    expected, rates = plainly(ADAMW, ranks=2)
    assert_trained_as(on_ranks(2, train, config, optimizer=ADAMW), expected, rates)
    with pytest.raises(
        ConfigError, match="Adagrad begins with a state that is not zero, and offloaded"
    ):
        on_ranks(1, train, config, optimizer=OPTIMIZERS["Adagrad"])


# ------------------------------------------------------------------------------------------- model_parameters
@pytest.mark.parametrize("stage, ranks", PARTS)
def test_groups_of_parameters_for_the_optimizer_of_the_json(stage, ranks):
    expected, rates = plainly(
        lambda module: torch.optim.AdamW(
            two_groups(module), lr=0.01, eps=1e-4, weight_decay=0.1
        )
    )
    assert_trained_as(
        on_ranks(ranks, train, config_of(stage, ranks), model_parameters=two_groups),
        expected,
        rates,
    )


OF_JSON = {
    "Lion": (PlainLion, {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}),
    "Lamb": (
        PlainLamb,
        {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize(
    "kind, stage, ranks",
    [("Lion", 2, 2), ("Adagrad", 3, 2), ("Lamb", 1, 2), ("Lamb", 3, 3)],
)
def test_other_optimizers_of_the_json_train_as_their_formulas(kind, stage, ranks):
    """LAMB's bounds are those of its parameter groups."""
    plain, params = OF_JSON[kind]
    keys, numbers = (
        ({"max_coeff": 2.0}, {"bounds": (0.01, 2.0)}) if kind == "Lamb" else ({}, {})
    )
    expected, rates = plainly(
        lambda module: plain(two_groups(module), **params, **numbers), ranks=ranks
    )
    config = config_of(stage, ranks) | {
        "optimizer": {"type": kind, "params": params | keys}
    }
    assert_trained_as(
        on_ranks(ranks, train, config, model_parameters=two_groups), expected, rates
    )


def test_parameters_that_are_not_given_are_not_trained():
    module = make(Stack)
    for initialized in (
        lambda m: [p for n, p in m.named_parameters() if "head" in n],
        lambda m: [(n, p) for n, p in m.named_parameters() if "head" in n],
    ):
        [(_, found)] = on_ranks(1, train, config_of(2, 1), model_parameters=initialized)
        assert {
            n for n, p in module.named_parameters() if not torch.equal(p, found[n])
        } == {"head.weight"}


@pytest.mark.parametrize(
    "given, says",
    [
        (
            lambda m: [nn.Parameter(torch.ones(2))],
            "1 of the 1 parameters of model_parameters= are not parameters of model=",
        ),
        (
            lambda m: [{"params": m.head.weight}, {"params": m.parameters()}],
            "head.weight is in two groups",
        ),
    ],
)
def test_groups_that_do_not_fit_the_module_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        on_ranks(1, train, config_of(1, 1), model_parameters=given)


# ------------------------------------------------------------------------------------------------- schedulers
SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 4),
    "lambda from zero": lambda o: LambdaLR(o, lambda step: step / 3),
    "one cycle": lambda o: OneCycleLR(o, 0.02, total_steps=9),
    "steps": lambda o: MultiStepLR(o, [1, 3]),
}


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_client_scheduler_is_stepped_at_the_boundary(kind, stage):
    expected, rates = plainly(ADAMW, SCHEDULERS[kind], accumulation=2, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch warns of a scheduler that is stepped before its optimizer
        results = on_ranks(
            2,
            train,
            without_optimizer(stage, 2, 2),
            optimizer=ADAMW,
            lr_scheduler=lambda module: SCHEDULERS[kind],
        )
    assert_trained_as(results, expected, rates)


def test_a_scheduler_that_was_made_from_the_optimizer_will_do():
    made = {}

    def main(rank, initialized):
        engine, _, _, scheduler = initialized
        assert scheduler is made["scheduler"] is engine.lr_scheduler
        rates, found = train(rank, initialized)
        assert scheduler.get_last_lr() == engine.get_lr()
        return rates, found

    def optimizer(module):
        made["optimizer"] = ADAMW(module)
        return made["optimizer"]

    expected, rates = plainly(ADAMW, SCHEDULERS["cosine"])
    scheduler = lambda module: made.setdefault(
        "scheduler", SCHEDULERS["cosine"](made["optimizer"])
    )
    assert_trained_as(
        on_ranks(
            1,
            main,
            without_optimizer(2, 1),
            optimizer=optimizer,
            lr_scheduler=scheduler,
        ),
        expected,
        rates,
    )


def test_the_scheduler_of_the_json_goes_with_a_client_optimizer():
    """WarmupCosineLR scales the rates of the groups, WarmupLR gives all groups the same."""
    rates_of = lambda kind, params: on_ranks(
        1,
        train,
        without_optimizer(
            1, 1, scheduler={"type": kind, "params": {"warmup_num_steps": 2, **params}}
        ),
        optimizer=ADAMW,
    )[0][0]
    assert [a == b for a, b in rates_of("WarmupLR", {"warmup_max_lr": 0.5})] == [
        True
    ] * 3
    cosine = rates_of("WarmupCosineLR", {"total_num_steps": 5, "warmup_type": "linear"})
    assert [b for _, b in cosine] == pytest.approx([3 * a for a, _ in cosine]) and max(
        a for a, _ in cosine
    ) > 0.004


def test_a_scheduler_that_would_have_no_effect_is_refused():
    other = lambda module: SCHEDULERS["StepLR"](ADAMW(make(Stack)))
    for scheduler, config, says in (
        (other, without_optimizer(0, 1), "of another optimizer, not of this engine's"),
        (lambda m: 3, without_optimizer(0, 1), "lr_scheduler is int"),
        (
            lambda m: SCHEDULERS["StepLR"],
            config_of(0, 1, scheduler={"type": "WarmupLR"}),
            "both .* schedule",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            on_ranks(1, train, config, optimizer=ADAMW, lr_scheduler=scheduler)


# ------------------------------------------------------------------------------------------------ checkpoints
@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_client_optimizer_and_scheduler_go_on_from_a_checkpoint(
    optimizer, kind, tmp_path
):
    if kind == "one cycle" and optimizer == "Adagrad":
        return  # it has no momentum to cycle
    expected, rates = plainly(OPTIMIZERS[optimizer], SCHEDULERS[kind], steps=4, ranks=2)
    given = {
        "optimizer": OPTIMIZERS[optimizer],
        "lr_scheduler": lambda module: SCHEDULERS[kind],
    }

    def first(rank, initialized):
        found = train(rank, initialized, 2)
        initialized.engine.save_checkpoint(tmp_path)
        return found

    def second(rank, initialized):
        initialized.engine.load_checkpoint(tmp_path)
        assert initialized.engine.micro_steps == 2
        return train(rank, initialized, 2, first=2)

    begun = on_ranks(2, first, without_optimizer(2, 2), **given)[0][0]
    for found_rates, found in on_ranks(1, second, without_optimizer(0, 1), **given):
        assert_trained_as(
            [(begun + found_rates, found)], expected, rates, rtol=2e-5, atol=5e-6
        )


@pytest.mark.parametrize(
    "options, rate, steps",
    [
        ({}, 0.005, 2),
        ({"load_lr_scheduler_states": False}, 0.01, 2),
        ({"load_module_only": True}, 0.01, 0),
        ({"load_optimizer_states": False}, 0.01, 0),
    ],
)
def test_parts_of_a_checkpoint_may_be_left_out(options, rate, steps, tmp_path):
    given = {"optimizer": ADAMW, "lr_scheduler": lambda module: SCHEDULERS["StepLR"]}

    def save(rank, initialized):
        _, found = train(rank, initialized, 2)
        initialized.engine.save_checkpoint(save_dir=tmp_path, tag=7)
        return found

    def load(rank, initialized):
        engine = initialized.engine
        engine.load_checkpoint(load_dir=tmp_path, tag=7, **options)
        return engine.get_lr()[0], engine.global_steps, weights(engine)

    [saved] = on_ranks(1, save, without_optimizer(1, 1), **given)
    [(found_rate, found_steps, found)] = on_ranks(
        1, load, without_optimizer(1, 1), **given
    )
    assert (found_rate, found_steps) == (rate, steps) and all(
        torch.equal(p, saved[name]) for name, p in found.items()
    )


def test_changes_of_the_rate_are_kept_and_a_new_json_has_its_effect(tmp_path):
    def save(rank, initialized):
        train(rank, initialized, 1)
        if initialized.optimizer.param_groups[0]["lr"] == 0.01:
            initialized.engine.set_lr(0.25)
        initialized.engine.save_checkpoint(tmp_path, "changed")

    def load(tag):
        def main(rank, initialized):
            initialized.engine.load_checkpoint(tmp_path, tag)
            return initialized.engine.get_lr()

        return main

    on_ranks(1, save, config_of(1, 1))
    other = config_of(1, 1)
    other["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 0.5, "weight_decay": 0.1, "eps": 1e-4},
    }
    assert on_ranks(1, load("changed"), other) == [[0.25]]
    on_ranks(1, save, other)  # its rate was not changed
    assert on_ranks(1, load("changed"), config_of(1, 1)) == [[0.01]]
    with pytest.raises(CheckpointError, match="state of the optimizer adam"):
        on_ranks(
            1, load("changed"), without_optimizer(1, 1), optimizer=OPTIMIZERS["SGD"]
        )


def test_a_scheduler_that_needs_a_metric_is_refused_before_the_update_or_given_it():
    plateau = partial(
        torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5
    )

    def main(rank, world):
        engine, *_ = megatron_ds.initialize(
            model=make(Stack),
            config=config_of(2, 1),
            lr_scheduler=plateau,
            mpu=Mesh(Grid.fit(1), rank, world.connect),
        )
        engine.backward(loss_of(engine, batches(1, 1, 1, rank)[0][0]))
        before = weights(engine)
        with pytest.raises(CallError, match="cannot step ReduceLROnPlateau.*metrics"):
            engine.step()
        assert all(torch.equal(p, before[name]) for name, p in weights(engine).items())
        # the same metric twice: no improvement
        engine.step(lr_kwargs={"metrics": 1.0})
        engine.backward(loss_of(engine, batches(1, 1, 1, rank)[0][0]))
        engine.step(lr_kwargs={"metrics": 1.0})
        return engine.global_steps, engine.get_lr()

    assert run_ranks(1, main) == [(2, [0.005])]
