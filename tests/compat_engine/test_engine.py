"""An engine on modules that know nothing of it, at every ZeRO stage, against torch alone in one process."""

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.errors import ConfigError, MegatronDSError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import (
    EPS,
    SAMPLES,
    STEPS,
    Stack,
    batches,
    config_of,
    loss_of,
    make,
    on_ranks,
    train,
    train_and_show,
    weights,
)
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def assert_same_training(results, norms, module, rtol=1e-5, atol=1e-6):
    expected = dict(module.named_parameters())
    for found_norms, found in results:
        assert found_norms == pytest.approx(norms, rel=rtol)
        assert found.keys() == expected.keys()
        for (
            name,
            value,
        ) in found.items():  # other orders of summation: per rank, then over ranks
            torch.testing.assert_close(
                value,
                expected[name].detach(),
                rtol=rtol,
                atol=atol,
                msg=lambda m, n=name: f"{n}: {m}",
            )


# ---------------------------------------------------------------------------------------------------- parity
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "stage, ranks", [(0, 1), (0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (2, 3), (3, 3)]
)
def test_an_odd_module_trains_as_with_torch_alone(stage, ranks, accumulation):
    plain = make()
    norms = train_plainly(
        plain,
        loss_of,
        batches(STEPS, accumulation, ranks),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    assert min(norms) > 0.5, "clipping is in force"
    assert_same_training(
        on_ranks(ranks, train_and_show, make, config_of(stage, ranks, accumulation)),
        norms,
        plain,
    )


def test_weights_over_inner_groups_train_an_odd_module_as_torch_alone():
    plain = make()
    norms = train_plainly(
        plain,
        loss_of,
        batches(STEPS, 1, 4),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    config = config_of(3, 4)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2

    def main(engine, rank):
        assert not any(
            axes == "dp-cp"
            for op, axes, _ in engine.world.mesh.traffic.bytes
            if op == "all_gather"
        )
        found = train_and_show(engine, rank)
        sent = {
            axes
            for op, axes, _ in engine.world.mesh.traffic.bytes
            if op in ("all_gather", "reduce_scatter")
        }
        assert sent == {"dp-cp-inner", "dp-cp-outer"}
        return found

    assert_same_training(on_ranks(4, main, make, config), norms, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_travel_in_the_format_of_the_json(stage):
    config = config_of(
        stage, 2, communication_data_type="fp16", prescale_gradients=True
    )
    half = lambda engine, rank: (
        train(engine, rank, 1),
        sum(
            count
            for (op, *_), count in engine.world.mesh.traffic.bytes.items()
            if op in ("reduce_scatter", "all_reduce")
        ),
    )
    for (norms, sent), (expected, twice) in zip(
        on_ranks(2, half, make, config), on_ranks(2, half, make, config_of(stage, 2))
    ):
        assert norms != expected and norms == pytest.approx(expected, rel=1e-3)
        assert (
            sent < 0.6 * twice
        )  # beside the norm, and what all ranks agree on at the start


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_recomputation_changes_nothing(stage):
    plain = make()
    norms = train_plainly(
        plain,
        loss_of,
        batches(STEPS, 1, 2),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    assert_same_training(
        on_ranks(2, train_and_show, lambda: make(recompute=True), config_of(stage, 2)),
        norms,
        plain,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "dtype, block",
    [
        (torch.bfloat16, {"bf16": {"enabled": True}}),
        (torch.float16, {"fp16": {"enabled": True, "loss_scale": 1024}}),
    ],
)
def test_sixteen_bit_training_keeps_fp32_masters(stage, dtype, block):
    plain = make(Stack)
    train_plainly(
        plain,
        loss_of,
        batches(STEPS, 1, 2),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
        dtype=dtype,
    )
    for _, found in on_ranks(
        2, train_and_show, lambda: make(Stack), config_of(stage, 2, **block)
    ):
        for name, p in plain.named_parameters():
            # Two units in the last place: gradients are rounded, with another order of summation.
            torch.testing.assert_close(
                found[name], p.detach(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3
            )


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_stage_has_the_bits_of_stage_0(ranks):
    """Without clipping: at stage 3 the squares of the norm are added in another order."""
    show = lambda stage: on_ranks(
        ranks, train_and_show, make, config_of(stage, ranks) | {"gradient_clipping": 0}
    )
    expected = show(0)
    for stage in (1, 2, 3):
        for (_, found), (_, other) in zip(show(stage), expected):
            assert all(torch.equal(value, other[name]) for name, value in found.items())


# ----------------------------------------------------------------------------------------- what the JSON says
def test_weight_decay_can_be_told_which_parameters_to_leave_out():
    decays = lambda name, p: p.dim() > 1
    plain = make()
    norms = train_plainly(
        plain,
        loss_of,
        batches(STEPS, 1, 2),
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
        decays=decays,
    )
    assert_same_training(
        on_ranks(2, train_and_show, make, config_of(1, 2), decay=decays), norms, plain
    )


def test_the_schedule_of_the_json_is_followed():
    schedule = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0.001,
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
            "total_num_steps": 4,
        },
    }
    rates = [0.001, 0.001, 0.0055, 0.01, 0.0055]  # DeepSpeed's own, at steps 0 to 4

    def main(engine, rank):
        seen = [engine.get_lr()]
        for step in range(4):
            train(engine, rank, 1, first=step)
            seen.append(engine.get_lr())
        return seen, weights(engine)

    plain = make()
    train_plainly(
        plain,
        loss_of,
        batches(4, 1, 2),
        lr=rates.__getitem__,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    results = on_ranks(2, main, make, config_of(1, 2, scheduler=schedule))
    assert [rate for [rate] in results[0][0]] == pytest.approx(rates)
    assert_same_training([([], found) for _, found in results], [], plain)


def test_an_overflow_is_skipped_and_halves_the_scale():
    def main(engine, rank):
        before, seen = weights(engine), []
        for step in range(3):
            tokens = batches(1, 1, 2, rank)[0][0]
            engine.backward(loss_of(engine, tokens) * (1e9 if step < 2 else 1))
            engine.step()
            same = all(torch.equal(p, before[n]) for n, p in weights(engine).items())
            seen.append(
                (engine.loss_scale(), engine.global_steps, engine.skipped_steps, same)
            )
        return seen

    block = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    for seen in on_ranks(2, main, make, config_of(2, 2, fp16=block)):
        assert seen == [(128.0, 1, 1, True), (64.0, 2, 2, True), (64.0, 3, 2, False)]


# --------------------------------------------------------------------------------------------------- the loop
@pytest.mark.parametrize("stage", [1, 3])
def test_only_the_boundary_updates(stage):
    def main(engine, rank):
        seen, before = [], weights(engine)
        for tokens in batches(1, 3, 2, rank)[0]:
            boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(loss_of(engine, tokens))
            engine.step()
            seen.append(
                (
                    boundary,
                    engine.global_steps,
                    all(torch.equal(p, before[n]) for n, p in weights(engine).items()),
                )
            )
        return seen

    for seen in on_ranks(2, main, make, config_of(stage, 2, accumulation=3)):
        assert seen == [(False, 0, True), (False, 0, True), (True, 1, False)]


def test_all_ranks_begin_with_the_weights_of_the_first():
    seeds = iter((3, 4))
    first, second = on_ranks(
        2,
        lambda engine, rank: weights(engine),
        lambda: make(seed=next(seeds)),
        config_of(3, 2),
    )
    expected = dict(make().named_parameters())
    for found in (first, second):
        assert all(torch.equal(p, expected[name]) for name, p in found.items())


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_take_different_paths_are_named(stage):
    def main(engine, rank):
        tokens = batches(1, 1, 2, rank)[0][0]
        engine.backward(
            loss_of(engine, tokens) + (engine.module.unused.weight.sum() if rank else 0)
        )
        with pytest.raises(MegatronDSError, match=r"unused.weight on rank\(s\) 0,"):
            engine.step()

    config = config_of(stage, 2)
    config["zero_optimization"]["ignore_unused_parameters"] = False
    on_ranks(2, main, make, config)


def test_wrong_use_of_the_loop_is_told():
    def main(engine, rank):
        loss = loss_of(engine, torch.zeros(2, 5, dtype=torch.long))
        for wrong, says in (
            ("loss", "got str"),
            (torch.ones(2), r"shape \[2\]"),
            (loss.detach(), "does not depend"),
        ):
            with pytest.raises(MegatronDSError, match=says):
                engine.backward(wrong)
        with pytest.raises(MegatronDSError, match="without a backward before it"):
            engine.step()
        engine.backward(loss)
        with pytest.raises(ConfigError, match="boundary"):
            engine.save_checkpoint("nowhere")
        with pytest.raises(ConfigError, match="not parameters of this engine's module"):
            engine.gathered_parameters(nn.Parameter(torch.ones(1))).__enter__()

    on_ranks(1, main, make, config_of(0, 1))


def test_a_module_or_an_mpu_that_cannot_be_trained_is_told():
    make_one = lambda model, **options: megatron_ds.initialize(
        model=model, config=config_of(0, 1), **options
    )
    for model, options, says in (
        ("gpt2", {}, "model is str"),
        (nn.Linear(2, 2).bfloat16(), {}, "2 parameters are not fp32"),
        (nn.Linear(2, 2, device="meta"), {}, "on the meta device"),
        (nn.Linear(2, 2), {"mpu": object()}, "mpu lacks get_model"),
        (
            nn.Linear(2, 2),
            {"mpu": Mesh(Grid(pp=2), 0, lambda *_: None)},
            "2 pipeline stages",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            make_one(model, **options)


# ------------------------------------------------------------------------------------ tensor-parallel modules
class Split(nn.Module):
    """A weight of which each of two ranks has rows, as in Megatron's layers, and a bias that all have."""

    def __init__(self, part=None):
        super().__init__()
        whole = torch.arange(24.0).view(6, 4) / 9
        self.weight = nn.Parameter(
            whole if part is None else whole.chunk(2)[part].clone()
        )
        self.bias = nn.Parameter(torch.ones(4))
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0

    def forward(self, x):
        return (x @ self.weight.T).square().mean(0).sum() + self.bias.pow(3).sum()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_megatrons_marks_on_split_parameters_are_understood(stage):
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2))

    def main(rank, world):
        mesh = Mesh(Grid(tp=2, dp=2), rank, world.connect)
        engine, *_ = megatron_ds.initialize(
            model=Split(mesh.coordinate("tp")), config=config_of(stage, 2), mpu=mesh
        )
        engine.backward(engine(x.chunk(2)[mesh.coordinate("dp")]))
        engine.step()
        return engine.get_global_grad_norm(), engine.full_state_dict()

    plain = Split()
    [norm] = train_plainly(
        plain,
        lambda module, x: module(x),
        [[x]],
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    results = run_ranks(4, main)
    assert [found for found, _ in results] == pytest.approx([norm] * 4, rel=1e-6)
    assert [len(state) for _, state in results] == [2, 0, 0, 0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-5, atol=1e-6)


class Sliced(nn.Module):
    """Two tensor-parallel ranks use `scale` on a half of x each, as under sequence parallelism; `offset` is a
    buffer."""

    def __init__(self, part=None):
        super().__init__()
        self.scale, self.part = nn.Parameter(torch.linspace(-1, 1, 4)), part
        self.scale.sequence_parallel = True
        for name in "abcd":
            self.register_buffer(name, torch.full((3,), 0.5))

    def forward(self, x):
        halves = x.chunk(2, dim=1)
        of = lambda half: (half * self.scale + self.a.sum()).square().sum((1, 2)).mean()
        return (
            of(halves[0]) + of(halves[1])
            if self.part is None
            else of(halves[self.part])
        )


@pytest.mark.parametrize("stage", [0, 2])
def test_partial_gradients_under_megatrons_mark_are_summed_and_all_buffers_saved(
    stage, tmp_path
):
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2)).view(
        SAMPLES, 2, 4
    )

    def main(rank, world):
        mesh = Mesh(Grid(tp=2, dp=2), rank, world.connect)
        engine = megatron_ds.initialize(
            model=Sliced(mesh.coordinate("tp")), config=config_of(stage, 2), mpu=mesh
        ).engine
        engine.backward(engine(x.chunk(2)[mesh.coordinate("dp")]))
        engine.step()
        engine.save_checkpoint(tmp_path)
        engine.module.d.zero_()
        engine.load_checkpoint(tmp_path)
        return (
            engine.get_global_grad_norm(),
            weights(engine)["scale"],
            engine.module.d.clone(),
        )

    plain = Sliced()
    [norm] = train_plainly(
        plain,
        lambda module, x: module(x),
        [[x]],
        lr=0.01,
        eps=EPS,
        clip=0.5,
        weight_decay=0.1,
    )
    for found, scale, buffer in run_ranks(4, main):
        assert found == pytest.approx(norm, rel=1e-6) and (buffer == 0.5).all()
        torch.testing.assert_close(scale, plain.scale.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("casts", [True, False])
def test_floating_point_inputs_are_cast_to_fp16_where_the_json_asks_for_it(casts):
    seen = []

    class Looking(nn.Linear):
        def forward(self, x, more):
            seen.append((x.dtype, more["scale"][0].dtype, more["ids"].dtype))
            return super().forward(x.half()) * more["scale"][0].half()

    config = {
        "train_batch_size": 2,
        "fp16": {"enabled": True, "auto_cast": casts},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "wall_clock_breakdown": False,
    }
    on_ranks(
        1,
        lambda engine, rank: engine(
            torch.ones(2, 3),
            {"scale": [torch.ones(1)], "ids": torch.ones(2, dtype=torch.long)},
        ),
        lambda: Looking(3, 3),
        config,
    )
    wide = torch.float16 if casts else torch.float32
    assert seen == [(wide, wide, torch.long)]
