"""Stage 3 in the trainer: what is whole when, what a step sends, and runs that change their stage in
between."""

import functools
import threading
from dataclasses import replace

import pytest
import torch

from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import DATA_AXES
from megatron_ds.planning import keep_gathered, replica_plan
from megatron_ds.training import build
from megatron_ds.training.step import evaluate
from tests.harness.engines import BATCH, load_state, save_state, train
from tests.harness.engines import config_of as config_of_job
from tests.harness.engines import on_engines as run
from tests.harness.layout_comparison import global_batch_share, random_samples
from tests.harness.samples import in_turns
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(6)]


def config_of(layout, style="gpt2", dtype="fp32", untie=False, dropout=0.0, layers=3):
    return config_of_job(
        tiny_job(style, dtype, untie, dropout, layers, BATCH, 8), layout
    )


def units_of(engine):
    return [
        unit for s in engine.optimizer.sets if s.plan.units for unit in s.store.units
    ]


def bytes_whole(engine):
    return sum(unit.flat.untyped_storage().nbytes() for unit in units_of(engine))


# ----------------------------------------------------------------------------------------- what is whole when
@pytest.mark.parametrize(
    "layout, layers_whole",
    [
        ("dp=2,zero=3,prefetch=0", 1),
        ("dp=2,zero=3", 2),
        ("dp=2,zero=3,recompute=full", 2),
        ("dp=2,pp=2,zero=3", 2),
        ("dp=2,zero=3,pin=1", 100),
        ("dp=2,zero=3,prefetch=1000000", 100),
    ],
)
def test_only_the_layer_at_work_and_those_ahead_are_whole(layout, layers_whole):
    def main(engine):
        (stage,) = engine.stages.values()
        most, inside = [0], stage.hooks.enter

        def enter(layer, backward):
            inside(layer, backward)
            most[0] = max(most[0], bytes_whole(engine))
            assert (
                all(
                    p.untyped_storage().nbytes()
                    for p in engine.modules[layer].parameters()
                )
                or backward
                and not layer
            )

        assert bytes_whole(engine) == 0
        stage.hooks = replace(stage.hooks, enter=enter)
        train(engine, range(2))
        return (
            most[0],
            bytes_whole(engine),
            sorted(unit.flat.nbytes for unit in units_of(engine)),
        )

    for most, afterwards, sizes in run(config_of(layout, untie=True), main):
        # One more where the last layer waits for its backward.
        assert (
            sum(sizes[-1:]) <= most <= sum(sizes[-layers_whole - 1 :])
            and afterwards == 0
        )
        assert layers_whole < 100 or most == sum(sizes)


def test_nothing_but_shards_is_ever_allocated_for_the_weights(monkeypatch):
    """Modules are made on the meta device, and each rank draws its part: no tensor as large as a matrix, but
    for draws."""
    made, allocate = [], build.build_stages

    def watched(layers):
        stages = allocate(layers)
        made.extend(
            p.device.type for modules in stages.values() for p in modules.parameters()
        )
        return stages

    monkeypatch.setattr(build, "build_stages", watched)
    run(config_of("dp=2,zero=3"), lambda engine: None)
    assert set(made) == {"meta"}


@pytest.mark.parametrize("style, dtype", [("gpt2", "fp32"), ("llama", "bf16")])
def test_weights_drawn_in_shards_have_the_bits_of_any_other_layout(style, dtype):
    def main(engine):
        with engine.optimizer.gathered(next(iter(engine.stages))):
            return {p.spec.name: p.detach().clone() for p in engine.parameters}

    whole = run(config_of("dp=1,tp=2", style, dtype), main)
    for rank, weights in enumerate(
        run(config_of("dp=2,tp=2,zero=3", style, dtype), main)
    ):
        for name, values in weights.items():
            assert torch.equal(values, whole[rank % 2][name]), name


def test_evaluation_gathers_too_and_gives_the_loss_of_one_process():
    class Loader:
        def batch(self, first, size, rank, ranks, training):
            engine, samples = self.engine, random_samples(16, SEQ_LENGTH, VOCAB, seed=2)
            return global_batch_share(samples, first, size, engine.config, engine.mesh)

    def main(engine):
        loader = Loader()
        loader.engine = engine
        return [
            evaluate(
                engine, loader, first_sample=0, iterations=2, global_batch_size=BATCH
            ).loss,
            *train(engine, range(1)),
            evaluate(
                engine, loader, first_sample=0, iterations=2, global_batch_size=BATCH
            ).loss,
        ]

    [expected] = run(config_of("dp=1"), main)
    for layout in ("dp=2,zero=3", "dp=2,pp=2,zero=3,pin=1"):
        for losses in run(config_of(layout), main):
            assert losses == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------- traffic
@pytest.mark.parametrize("dtype, parameter_bytes", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_sends_what_the_paper_promises(zero, dtype, parameter_bytes):
    """2Ψ, 2Ψ, 2Ψ and 3Ψ times (n - 1) / n where there is one micro-batch; here are two.

    Tied, so that gathers spared for the embedding are spent for the head.
    """
    persistence = ",persist=0" if zero == 3 else ""

    def main(engine):
        engine.mesh.traffic.clear()
        train(engine, range(1))
        traffic = {
            op: sent
            for (op, axes, _), sent in engine.mesh.traffic.bytes.items()
            if axes == "dp-cp"
        }
        traffic["all_reduce"] -= 24  # the norm's
        wire = {
            op: sent
            for (op, axes, _), sent in engine.mesh.traffic.wire_bytes().items()
            if axes == "dp-cp"
        }
        return traffic, wire, engine.optimizer

    for traffic, wire, optimizer in run(
        config_of(f"dp=2,zero={zero}{persistence}", dtype=dtype), main
    ):
        psi = sum(s.plan.layout.numel for s in optimizer.sets)
        true = sum(p.numel() for s in optimizer.sets for p in s.parameters)
        assert true <= psi <= 1.1 * true  # padding to 128 elements, of rows of 32
        m = BATCH // 2
        expected = {
            0: {"all_reduce": 4 * psi},
            1: {"reduce_scatter": 4 * psi, "all_gather": parameter_bytes * psi},
            2: {"reduce_scatter": 4 * psi * m, "all_gather": parameter_bytes * psi},
        }
        if zero < 3:
            assert {op: sent for op, sent in traffic.items() if sent} == expected[zero]
        else:
            assert traffic["all_gather"] == parameter_bytes * m * 2 * psi
            assert traffic["reduce_scatter"] == 4 * m * psi
        assert optimizer.traffic(m, zero >= 2, False) == {
            (op, "dp-cp"): sent for op, sent in traffic.items() if sent
        }
        elements = sum(
            wire[op] / {"all_gather": parameter_bytes}.get(op, 4)
            for op, sent in traffic.items()
            if sent
        )
        once = {0: 2, 1: 2, 2: 1 + m, 3: 3 * m}[zero]
        assert (
            elements - (6 if zero == 0 else 0) == once * psi * (2 - 1) / 2
        )  # 6: of the norm, 24 bytes


TRAFFIC = [
    "dp=2,zero=3,accumulate=full",
    "dp=2,zero=3,pin=1",
    "dp=2,pp=2,zero=3",
    "dp=4,zero=3",
    "dp=2,pp=2,zero=3,schedule=gpipe",
    "dp=2,zero=3,prefetch=20000",
    "dp=2,tp=2,zero=2",
    "dp=2,zero=3,prefetch=0,bucket=3000",
    "dp=2,zero=2,accumulate=full",
    "dp=2,zero=0,comm=fp16",
    "dp=4,zero=1,comm=fp16,prescale=1",
    "dp=2,pp=2,zero=3,comm=bf16",
    "dp=4,zero=3,hpz=2",
    "dp=4,pp=2,zero=3,hpz=2,accumulate=full",
    "dp=4,zero=3,hpz=4,pin=1",
    "dp=2,pp=2,zero=3,schedule=zb-h1",
    "dp=2,pp=2,zero=3,schedule=interleaved",
    "dp=2,pp=2,zero=3,schedule=zb-v",
    "dp=2,pp=2,zero=3,schedule=zb-v,pin=1",
    "dp=2,pp=2,zero=2,schedule=zb-v",
    "dp=2,pp=2,zero=1,schedule=zb-v",
    "dp=4,zero=3,hpz=2,qw=1,qg=1",
    "dp=2,zero=2,qg=1",
]


@pytest.mark.parametrize("layout, untie", in_turns(TRAFFIC, [False, True]))
def test_planned_traffic_is_counted_traffic(layout, untie):
    def main(engine):
        engine.mesh.traffic.clear()
        train(engine, range(1))
        traffic = {
            (op, axes): sent
            for (op, axes, _), sent in engine.mesh.traffic.bytes.items()
            if axes.startswith("dp-cp")
        }
        traffic["all_reduce", "dp-cp"] -= 24
        return traffic, engine.traffic()

    for counted, planned in run(config_of(layout, untie=untie, layers=4), main):
        assert {op: sent for op, sent in counted.items() if sent} == planned


# ------------------------------------------------------------------------------------------ pinning by itself
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=3",
        "dp=2,pp=2,zero=3,recompute=full",
        "dp=4,zero=3,hpz=2,accumulate=full",
    ],
)
def test_stages_are_kept_gathered_where_all_ranks_have_room(layout, monkeypatch):
    def main(engine):
        engine.mesh.traffic.clear()
        losses = train(engine, range(1))
        inner = engine.optimizer.groups.ranks_of(DATA_AXES).inner
        gathers = engine.mesh.traffic.calls["all_gather", inner.axes, inner.size]
        return engine.keeps_gathered, engine.why_gathered, losses, gathers

    def with_memory(least):
        monkeypatch.setattr(
            keep_gathered,
            "memory_of_rank",
            lambda mesh: least if mesh.rank == 1 else 10**12,
        )
        monkeypatch.setattr(
            replica_plan, "memory_of_rank", keep_gathered.memory_of_rank
        )
        return run(config_of(f"{layout},pin=auto"), main)

    roomy, tight = with_memory(10**11), with_memory(10**5)
    assert all(
        pinned and "keeps each stage gathered: rank 1, which has the least" in text
        for pinned, text, _, _ in roomy
    )
    assert all(
        not pinned and "keeps no stage gathered: rank 1, which has the least" in text
        for pinned, text, _, _ in tight
    )
    for (_, _, losses, few), (_, _, expected, many) in zip(roomy, tight):
        assert losses == expected and few < many
    told = run(
        config_of(f"{layout},pin=1"),
        lambda engine: (engine.keeps_gathered, engine.why_gathered),
    )
    assert told == [(True, "")] * len(told)


def test_the_memory_of_a_machine_is_shared_out_among_its_ranks(monkeypatch):
    free = {0: 1000, 1: 900, 2: 5000, 3: 7000}
    here = threading.local()
    monkeypatch.setattr(keep_gathered, "free_memory", lambda device: free[here.rank])
    monkeypatch.setattr(
        keep_gathered.socket, "gethostname", lambda: "one" if here.rank < 2 else "two"
    )

    def main(rank, world):
        here.rank = rank
        return keep_gathered.memory_of_rank(Mesh(Grid(dp=4), rank, world.connect))

    assert run_ranks(4, main) == [450, 450, 2500, 2500]


def test_what_pinning_plans_for_is_what_a_step_takes():
    """State to the byte, whole weights to the byte, gradient buffers not less than measured."""

    def main(engine):
        budget = keep_gathered._budget(engine.config, engine.mesh, 0, engine.plan)
        (stage,) = engine.stages.values()
        most, inside = [0], stage.hooks.enter
        stage.hooks = replace(
            stage.hooks,
            enter=lambda *args: (inside(*args), most.append(bytes_whole(engine))),
        )
        train(engine, range(2))
        return (
            budget,
            engine.optimizer.memory().total,
            max(most),
            engine.optimizer.working_bytes,
        )

    for layout in ("dp=2,zero=3,pin=1", "dp=2,zero=3,pin=1,accumulate=full"):
        for budget, held, whole, gradients in run(config_of(layout), main):
            assert (budget.state, budget.weights) == (
                held,
                whole,
            ) and 0 < gradients <= budget.buffers


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("schedule, recompute", [("zb-h1", "none"), ("zb-v", "full")])
def test_weights_kept_gathered_are_gone_when_only_weight_halves_are_left(
    schedule, recompute, untie
):
    def main(engine):
        inputs, whole = {}, []

        def watch(stage, input_half, weight_half):
            def backward_input(microbatch, grad):
                inputs[stage.index] = inputs.get(stage.index, 0) + 1
                return input_half(microbatch, grad)

            def backward_weights(microbatch):
                if (
                    len(inputs) == len(engine.stages)
                    and min(inputs.values()) == BATCH // 2
                ):
                    whole.append(bytes_whole(engine))
                weight_half(microbatch)

            stage.backward_input, stage.backward_weights = (
                backward_input,
                backward_weights,
            )

        for stage in engine.stages.values() if engine.keeps_gathered else ():
            watch(stage, stage.backward_input, stage.backward_weights)
        return train(engine, range(1)), whole

    layout = f"dp=2,pp=2,zero=3,schedule={schedule},recompute={recompute}"
    pinned, plain = (
        run(config_of(f"{layout}{pin}", untie=untie, layers=4), main)
        for pin in (",pin=1", "")
    )
    assert [losses for losses, _ in pinned] == [losses for losses, _ in plain]
    assert all(whole and not any(whole) for _, whole in pinned)


# ------------------------------------------------------------------------------------------------ checkpoints
# before, after
CONTINUED = [
    ("dp=2,zero=3", "dp=1"),
    ("dp=1", "dp=2,zero=3,pp=2"),
    ("dp=2,zero=2,tp=2", "dp=4,zero=3"),
    ("dp=4,zero=3", "dp=2,zero=1"),
    ("dp=4,zero=3,hpz=2", "dp=2,zero=1"),
    ("dp=2,zero=3", "dp=4,pp=2,zero=3,hpz=2"),
    ("dp=2,pp=2,zero=3", "dp=2,tp=2,zero=2,sp=1"),
    ("dp=2,zero=3", "dp=2,zero=3,bucket=2000,persist=0"),
    ("pp=2,dp=2,zero=3,schedule=zb-v", "pp=2,tp=2,schedule=1f1b"),
    ("pp=2,schedule=interleaved", "pp=2,schedule=zb-v,dp=2,zero=1"),
    ("pp=4,schedule=zb-h1", "pp=2,dp=2,zero=2,schedule=interleaved"),
    ("dp=2,zero=3", "pp=2,dp=2,zero=3,schedule=zb-v"),
]


@functools.cache
def of_one_process(dtype):
    """The losses of six steps."""
    config = config_of("dp=1", dtype=dtype, layers=4)
    [losses] = run(config, lambda engine: train(engine, range(6)))
    return losses


@pytest.mark.parametrize("layouts, dtype", in_turns(CONTINUED, ["fp32", "bf16"]))
def test_a_run_saved_at_one_stage_goes_on_at_another(layouts, dtype, tmp_path):
    before, after = layouts

    def first(engine):
        return train(engine, range(3)), save_state(engine, tmp_path, 3)

    def second(engine):
        load_state(engine, tmp_path, 3, numbers)
        return train(engine, range(3, 6))

    losses_before, numbers = run(config_of(before, dtype=dtype, layers=4), first)[0]
    expected = of_one_process(dtype)
    tolerance = (
        1e-6 if dtype == "fp32" else 2e-4
    )  # in 16 bits each order of summation rounds differently
    for losses in run(config_of(after, dtype=dtype, layers=4), second):
        assert losses_before + losses == pytest.approx(expected, rel=tolerance)


def test_the_bits_of_a_checkpoint_do_not_depend_on_the_stage_that_loads_and_saves_it(
    tmp_path,
):
    numbers = {}

    def copy(source, target):
        def main(engine):
            if source is None:
                train(engine, range(2))
            else:
                load_state(engine, tmp_path / source, 1, numbers[source])
            numbers[target] = save_state(engine, tmp_path / target, 1)

        return main

    for i, layout in enumerate(
        (
            "dp=2,zero=1",
            "dp=4,zero=3",
            "dp=4,zero=3,hpz=2",
            "dp=2,tp=2,zero=3,persist=0",
            "dp=2,pp=2,zero=2",
            "dp=1",
        )
    ):
        run(config_of(layout, dtype="bf16"), copy(str(i - 1) if i else None, str(i)))
    first, last = read(tmp_path / "0"), read(tmp_path / "5")
    assert first.keys() == last.keys() and all(
        torch.equal(first[name], last[name]) for name in first
    )


def read(folder):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "iter_0000001", folder / "whole.pt")
    return torch.load(folder / "whole.pt")
