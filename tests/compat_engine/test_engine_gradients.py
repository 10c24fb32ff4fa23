"""Gradients between backward and step: when they are dropped, where a program sees and changes them."""

import copy

import pytest
import torch

import megatron_ds
from megatron_ds.compat.deepspeed import utils
from megatron_ds.errors import ConfigError, MegatronDSError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    EPS,
    STEPS,
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


# ------------------------------------------------------------------------------------------ zero_grad
@pytest.mark.parametrize("caller", ["engine", "optimizer"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_anywhere_in_the_loop_changes_nothing(stage, caller, caplog):
    def main(engine, rank):
        zero = (engine if caller == "engine" else engine.optimizer).zero_grad
        for microbatches in batches(STEPS, 3, 2, rank):
            for tokens in microbatches:
                zero()
                loss = loss_of(engine, tokens)
                zero()
                engine.backward(loss)
                zero()
                engine.step()
                zero()
        return engine.global_steps, weights(engine)

    config = config_of(stage, 2, accumulation=3)
    expected = on_ranks(2, trained, lambda: make(Stack), config)
    for (steps, found), (_, other) in zip(
        on_ranks(2, main, lambda: make(Stack), config), expected
    ):
        assert steps == STEPS and all(
            torch.equal(p, other[name]) for name, p in found.items()
        )
    assert (
        caplog.text.count("in the middle of an update has no effect") == 1
    )  # rank 0, once


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("stage", [0, 1])
def test_zero_grad_drops_what_was_added_in_no_sync(stage, more, caplog):
    def main(engine, rank, dropped):
        for microbatches in batches(STEPS, 3, 2, rank):
            for zero in (engine.zero_grad, engine.module.zero_grad)[:dropped]:
                with engine.no_sync():
                    engine.backward(loss_of(engine, microbatches[0]))
                    engine.backward(loss_of(engine, microbatches[0]))
                zero()
            with engine.no_sync():
                engine.backward(loss_of(engine, microbatches[1]))
            engine.backward(loss_of(engine, microbatches[2]))
            if dropped:
                engine.zero_grad()  # gradients are averaged now, and stay
            engine.step()
        return weights(engine)

    config = config_of(stage, 2, **more)
    runs = [
        on_ranks(2, lambda engine, rank, n=n: main(engine, rank, n), make_stack, config)
        for n in (0, 2)
    ]
    for expected, found in zip(*runs):
        assert all(torch.equal(p, expected[name]) for name, p in found.items())
    assert "in the middle of an update has no effect" in caplog.text


def test_zero_grad_is_refused_where_gradients_of_no_sync_were_added_to_a_micro_batch():
    def main(engine, rank):
        (first, second), *_ = batches(1, 2, 2, rank)
        engine.backward(loss_of(engine, first))
        engine.step()
        engine.zero_grad()  # between micro-batches: no effect
        with engine.no_sync():
            engine.backward(loss_of(engine, second))
        with pytest.raises(MegatronDSError, match="no_sync in micro-batch 2 of the 2"):
            engine.zero_grad()
        engine.discard_gradients()
        return engine.has_gradients

    config = config_of(0, 2, accumulation=2)
    assert on_ranks(2, main, make_stack, config) == [False, False]


def make_stack():
    return make(Stack)


# ------------------------------------------------------------------------------------------ p.grad
def reference(step=0, accumulation=1, ranks=2, rank=None, model=Stack):
    """The gradients of the mean loss over ranks and micro-batches of a step, or of one rank's."""
    plain = make(model)
    which = range(ranks) if rank is None else [rank]
    losses = [
        loss_of(plain, tokens)
        for r in which
        for tokens in batches(step + 1, accumulation, ranks, r)[step]
    ]
    (sum(losses) / len(losses)).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def assert_same(found, expected, **limits):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        wanted = {"rtol": 1e-4, "atol": 1e-6} | limits
        torch.testing.assert_close(
            found[name].float(),
            grad.float(),
            **wanted,
            msg=lambda m, name=name: f"{name}: {m}",
        )


trained = lambda engine, rank, steps=STEPS: (
    train(engine, rank, steps),
    weights(engine),
)
grads = lambda engine: {name: p.grad for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "stage, ranks, more",
    [
        (0, 1, {}),
        (0, 2, {}),
        (2, 1, {}),
        (3, 1, {}),
        (0, 3, {}),
        (0, 2, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        (0, 2, {"bf16": {"enabled": True}}),
    ],
)
def test_grad_is_the_mean_over_ranks_where_a_rank_holds_it(
    stage, ranks, more, accumulation
):
    def main(engine, rank):
        found = []
        for tokens in batches(1, accumulation, ranks, rank)[0]:
            assert (
                all(p.grad is None for p in engine.parameters()) or engine.micro_steps
            )
            engine.backward(loss_of(engine, tokens))
            found.append({name: grad.clone() for name, grad in grads(engine).items()})
            engine.step()
        assert all(p.grad is None for p in engine.parameters())
        return found

    limits = {"rtol": 0.02, "atol": 1e-3} if more else {}
    results = on_ranks(
        ranks, main, lambda: make(Stack), config_of(stage, ranks, accumulation, **more)
    )
    for rank, found in enumerate(results):
        assert_same(
            found[-1], reference(accumulation=accumulation, ranks=ranks), **limits
        )
        if accumulation == 2:  # this rank's sum so far, in DeepSpeed
            plain = make(Stack)
            (loss_of(plain, batches(1, 2, ranks, rank)[0][0]) / 2).backward()
            assert_same(
                found[0],
                {name: p.grad for name, p in plain.named_parameters()},
                **limits,
            )


@pytest.mark.parametrize("stage, ranks", [(0, 1), (0, 2), (3, 1)])
@pytest.mark.parametrize(
    "more", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}]
)
def test_a_program_clips_what_is_applied(stage, ranks, more):
    def main(engine, rank):
        for microbatches in batches(STEPS, 2, ranks, rank):
            for tokens in microbatches:
                engine.backward(loss_of(engine, tokens))
                if engine.is_gradient_accumulation_boundary():
                    norms.append(
                        float(torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.1))
                    )
                engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(0.1, rel=1e-3)
        return weights(engine)

    norms = []
    config = config_of(stage, ranks, 2, **more) | {"gradient_clipping": 0.0}
    found = on_ranks(ranks, main, lambda: make(Stack), config)
    by_json = on_ranks(
        ranks, trained, lambda: make(Stack), config | {"gradient_clipping": 0.1}
    )
    limits = {"rtol": 1e-2, "atol": 2e-3} if more else {"rtol": 1e-4, "atol": 1e-6}
    assert norms[:ranks] == pytest.approx([by_json[0][0][0]] * ranks, rel=1e-2)
    for one, (_, other) in zip(found, by_json):
        assert_same(one, other, **limits)


def test_gradients_may_be_replaced_or_dropped_one_by_one():
    def main(engine, rank):
        engine.backward(loss_of(engine, batches(1, 1, 2, rank)[0][0]))
        head, embed = engine.module.head.weight, engine.module.embed.weight
        head.grad = torch.full_like(head, 3.0)
        embed.grad = None
        found = head.grad.clone(), embed.grad.clone()
        engine.step()
        return found, engine.module.embed.weight.detach().clone()

    config = config_of(0, 2) | {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
    }
    for (head, embed), after in on_ranks(2, main, lambda: make(Stack), config):
        assert (
            (head == 3).all()
            and not embed.any()
            and torch.equal(after, make(Stack).embed.weight)
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_shard_is_not_shown_as_no_gradient(stage):
    def main(engine, rank):
        first, second = batches(1, 2, 2, rank)[0]
        engine.backward(loss_of(engine, first))
        local = engine.module.head.weight.grad
        engine.step()
        engine.backward(loss_of(engine, second))
        with pytest.raises(
            MegatronDSError, match=f"ZeRO stage {stage}: each of 2 .*safe_get_full_grad"
        ):
            torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        engine.step()
        return local is not None, weights(engine)

    expected = on_ranks(
        2,
        lambda engine, rank: trained(engine, rank, 1),
        lambda: make(Stack),
        config_of(stage, 2, 2),
    )
    for (has_local, found), (_, other) in zip(
        on_ranks(2, main, lambda: make(Stack), config_of(stage, 2, 2)), expected
    ):
        assert has_local == (stage == 1) and all(
            torch.equal(found[name], p) for name, p in other.items()
        )


# ------------------------------------------------------------------------------------------ values
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
def test_whole_gradients_masters_and_states_are_read_and_set_at_every_stage(
    stage, more
):
    def main(engine, rank):
        named = dict(engine.module.named_parameters())
        train(engine, rank, 1)
        engine.backward(loss_of(engine, batches(1, 1, 2, rank)[0][0]))
        found = {name: utils.safe_get_full_grad(p).clone() for name, p in named.items()}
        utils.safe_update_full_grad_vectorized(
            engine.module.parameters(), lambda grad, p: grad * 0.01
        )
        halved = utils.safe_get_full_grad(engine.module.head.weight).clone()
        engine.step()
        norm = engine.get_global_grad_norm()
        moments = {
            name: utils.safe_get_full_optimizer_state(p, "exp_avg")
            for name, p in named.items()
        }
        utils.safe_set_full_optimizer_state(
            engine.module.head.weight, torch.ones(11, 14), "exp_avg_sq"
        )
        value = torch.linspace(-1, 1, 11 * 14).view(11, 14)
        utils.safe_set_full_fp32_param(engine.module.head.weight, value)
        masters = {name: utils.safe_get_full_fp32_param(p) for name, p in named.items()}
        again = utils.safe_get_full_optimizer_state(
            engine.module.head.weight, "exp_avg_sq"
        )
        with pytest.raises(
            ConfigError, match="has no state 'momentum'. It has exp_avg, exp_avg_sq"
        ):
            utils.safe_get_full_optimizer_state(engine.module.head.weight, "momentum")
        return found, halved, norm, moments, masters, again, weights(engine), value

    results = on_ranks(
        2,
        main,
        lambda: make(Stack),
        config_of(stage, 2, **more) | {"gradient_clipping": 0.0},
    )
    plain = results[0][0]
    total = sum(grad.square().sum() for grad in plain.values()).sqrt()
    for found, halved, norm, moments, masters, again, after, value in results:
        assert all(torch.equal(found[name], grad) for name, grad in plain.items())
        assert torch.equal(
            halved, plain["head.weight"] * 0.01
        ) and norm == pytest.approx(float(total) / 100)
        assert (again == 1).all() and torch.equal(masters["head.weight"], value)
        assert all(
            torch.equal(after[name], p.to(after[name].dtype))
            for name, p in masters.items()
        )
        assert all(
            m.shape == masters[name].shape and m.any() for name, m in moments.items()
        )
    if not more:
        first = on_ranks(
            2,
            lambda engine, rank: train(engine, rank, 1) and weights(engine),
            lambda: make(Stack),
            config_of(stage, 2) | {"gradient_clipping": 0.0},
        )[0]
        module = make(Stack)
        module.load_state_dict(first)
        (
            sum(loss_of(module, batches(1, 1, 2, rank)[0][0]) for rank in range(2)) / 2
        ).backward()
        assert_same(plain, {name: p.grad for name, p in module.named_parameters()})


def test_whole_gradients_exist_between_backward_and_step_only():
    def main(engine, rank):
        p = engine.module.head.weight
        before = utils.safe_get_full_grad(p)
        with pytest.raises(MegatronDSError, match="no gradient to set"):
            utils.safe_set_full_grad(p, torch.zeros_like(p))
        return before, utils.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(1)))

    assert on_ranks(2, main, lambda: make(Stack), config_of(2, 2)) == [(None, None)] * 2


# ------------------------------------------------------------------------------------------ loss.backward()
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
    ],
)
def test_the_backward_of_torch_trains_as_that_of_the_engine(stage, more):
    def main(engine, rank):
        for microbatches in batches(STEPS, 2, 2, rank):
            for tokens in microbatches:
                engine.zero_grad()
                loss = loss_of(engine, tokens)
                (engine.scale(loss) if "fp16" in more else loss).backward()
                engine.step()
        return engine.global_steps, weights(engine)

    config = config_of(stage, 2, 2, **more)
    expected = on_ranks(2, trained, lambda: make(Stack), config)
    for (steps, found), (_, other) in zip(
        on_ranks(2, main, lambda: make(Stack), config), expected
    ):
        assert steps == STEPS
        assert_same(
            found,
            {name: p.float() for name, p in other.items()},
            **({"rtol": 0.02, "atol": 2e-3} if more else {}),
        )


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_torch_that_an_error_cut_off_leaves_nothing_behind(
    stage, by_torch
):
    def main(engine, rank):
        for step, (tokens, _) in enumerate(batches(STEPS, 2, 2, rank)):
            if step == 1:
                fails = engine.module.blocks[1].register_full_backward_pre_hook(error)
                loss = loss_of(engine, tokens)
                with pytest.raises(ArithmeticError):
                    loss.backward()
                fails.remove()
                engine.discard_gradients()
            loss = loss_of(engine, tokens)
            loss.backward() if by_torch else engine.backward(loss)
            engine.step()
        return weights(engine)

    def error(*_):
        raise ArithmeticError

    def whole(engine, rank):
        for tokens, _ in batches(STEPS, 2, 2, rank):
            engine.backward(loss_of(engine, tokens))
            engine.step()
        return weights(engine)

    config = config_of(stage, 2)
    expected = on_ranks(2, whole, lambda: make(Stack), config)
    for found, other in zip(on_ranks(2, main, lambda: make(Stack), config), expected):
        assert_same(found, other)


def test_torchs_backward_with_fp16_needs_the_loss_scale():
    def main(engine, rank):
        with pytest.raises(MegatronDSError, match=r"engine.scale\(loss\).backward\(\)"):
            loss_of(engine, batches(1, 1, 1, rank)[0][0]).backward()

    on_ranks(1, main, lambda: make(Stack), config_of(1, 1, fp16={"enabled": True}))


@pytest.mark.parametrize("stages", [(0, 0), (2, 1), (3, 3)])
def test_one_backward_of_torch_trains_two_engines(stages):
    """The second one's loss goes through the first one's outputs."""

    def main(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        engines = [
            megatron_ds.initialize(
                model=module, config=config_of(stage, 2), mpu=mesh
            ).engine
            for module, stage in zip(modules[rank], stages)
        ]
        for [tokens] in batches(STEPS, 1, 2, rank):
            engines[1](engines[0](tokens)).square().mean().backward()
            for engine in engines:
                engine.step()
        return [weights(engine) for engine in engines]

    parts = lambda: (
        make(Stack),
        torch.nn.Sequential(torch.nn.Linear(11, 8), torch.nn.Tanh()),
    )
    modules = [parts() for _ in range(2)]
    for (one, two), (other, last) in zip(modules[1:], modules[:1]):
        one.load_state_dict(other.state_dict()), two.load_state_dict(last.state_dict())
    plain = [copy.deepcopy(module) for module in modules[0]]
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=0.01, eps=EPS, weight_decay=0.1)
        for module in plain
    ]
    for [one, two] in zip(*(sum(batches(STEPS, 1, 2, rank), []) for rank in range(2))):
        (
            sum(plain[1](plain[0](tokens)).square().mean() for tokens in (one, two)) / 2
        ).backward()
        for module, optimizer in zip(plain, optimizers):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(2, main):
        for named, module in zip(found, plain):
            assert_same(named, dict(module.named_parameters()))
