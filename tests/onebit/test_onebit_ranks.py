"""Real ranks with one bit an element against the loop over workers of `tests/harness/onebit_simulator.py`."""

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.config import OptimizerConfig
from megatron_ds.extensions.onebit.compressed_mean import CompressedMean
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import OPTIMIZERS, RegisteredOptimizer, default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse, plan_parameters
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.engine_runs import Stack, batches, loss_of
from tests.harness.engine_runs import make as module_of
from tests.harness.engine_runs import weights as engine_weights
from tests.harness.gradients import contribute
from tests.harness.onebit_simulator import SimulatedRun
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SHAPES = {"rows": (12, 7), "matrix": (40, 9), "cube": (3, 5, 20), "vector": (70,)}
EMPTY, OF_ONE = 3, 5  # rows: without any gradient, with one on the last worker only
STEPS, LR, DECAY, CLIP = 14, 0.02, 0.1, 8.0
OPTIONS = {
    "onebit_adam": dict(freeze_step=5),
    "onebit_lamb": dict(freeze_step=5, lamb_min_coeff=0.02),
    "zero_one_adam": dict(
        var_freeze_step=6,
        var_update_scaler=2,
        local_step_scaler=3,
        local_step_clipper=2,
    ),
}


def weights():
    draw = torch.Generator().manual_seed(7)
    found = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    found["rows"][EMPTY] = 0.0
    return found


def share(worker, workers, step, name):
    draw = torch.Generator().manual_seed(1000 * step + 100 * worker + len(name))
    g = (torch.randn(SHAPES[name], generator=draw) + 0.5) / workers
    if name == "rows":
        g[EMPTY] = 0.0
        g[OF_ONE] *= worker == workers - 1
    return g


def make(settings, groups):
    parameters = []
    for name, w in weights().items():
        parameters.append(nn.Parameter(w))
        parameters[-1].spec = ParamSpec(
            name, tuple(w.shape), Init("zeros"), decay=name != "vector"
        )
    return parameters, ZeroOptimizer(
        parameters, settings, groups, ParameterUse({0: [parameters]})
    )


def settings_of(name, stage, bucket=None, corrects=True):
    config = OptimizerConfig(
        optimizer=name, adam_bias_correction=corrects, adam_beta2=0.99, **OPTIONS[name]
    )
    return config, ZeroSettings(
        default_groups(RegisteredOptimizer(name, config)),
        STAGES[stage],
        bucket_elements=bucket,
        clip_grad=CLIP,
    )


def one_step(optimizer, parameters, rank, workers, step):
    optimizer.begin_step()
    optimizer.arm()
    for p in reversed(parameters):
        contribute(p, share(rank, workers, step, p.spec.name))
    return optimizer.step(LR, DECAY).grad_norm


def real(name, stage, workers, bucket, corrects):
    _, settings = settings_of(name, stage, bucket, corrects)

    def main(rank, world):
        groups = DataGroups({DATA_AXES: world.group("dp", range(workers), rank)})
        parameters, optimizer = make(settings, groups)
        norms = [
            one_step(optimizer, parameters, rank, workers, step)
            for step in range(STEPS)
        ]
        return {p.spec.name: p.detach().clone() for p in parameters}, norms

    return run_ranks(workers, main)


def simulated(name, workers, corrects):
    config, _ = settings_of(name, 0)
    runs = {}
    for decay in (DECAY, 0.0):
        runs[decay] = SimulatedRun(
            name,
            OPTIMIZERS.declared(name).rule_of(config).phases,
            weights(),
            workers,
            lr=LR,
            weight_decay=decay,
            clip=CLIP,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            corrects=corrects,
            min_coeff=config.lamb_min_coeff,
            max_coeff=config.lamb_max_coeff,
            coeff_beta=config.coeff_beta,
            factor_max=config.factor_max,
            factor_min=config.factor_min,
            factor_threshold=config.factor_threshold,
        )
    norms = []
    for step in range(STEPS):
        shares = [
            {n: share(i, workers, step, n) for n in SHAPES} for i in range(workers)
        ]
        for run in runs.values():
            run.step(shares)
        norms.append(runs[DECAY].grad_norm)
    of = lambda n, worker: runs[0.0 if n == "vector" else DECAY].weights_of(worker)[n]
    return [({n: of(n, i) for n in SHAPES}, norms) for i in range(workers)]


@pytest.mark.parametrize(
    "name, stage, workers, bucket, corrects",
    [
        ("onebit_adam", 0, 2, None, True),
        ("onebit_adam", 1, 3, 300, False),
        ("onebit_adam", 0, 1, None, True),
        ("onebit_lamb", 0, 4, 300, True),
        ("onebit_lamb", 1, 2, None, False),
        ("zero_one_adam", 0, 2, None, False),
        ("zero_one_adam", 0, 4, 300, True),
    ],
)
def test_ranks_do_what_the_simulated_workers_do(name, stage, workers, bucket, corrects):
    expected = simulated(name, workers, corrects)
    for (got, norms), (want, want_norms) in zip(
        real(name, stage, workers, bucket, corrects), expected
    ):
        assert norms == pytest.approx(want_norms, rel=1e-6)
        for n in SHAPES:
            torch.testing.assert_close(got[n], want[n], rtol=1e-6, atol=2e-6)
        assert not got["rows"][EMPTY].any()
    of_first = expected[0][0]
    assert all(not torch.allclose(of_first[n], w) for n, w in weights().items())


# ----------------------------------------------------------------------------------- the mean, an engine
def test_what_is_sent_over_all_calls_is_what_was_given_less_the_errors():
    """Σ result = Σ mean x - mean of the workers' errors - the servers' error; for any bucket size, and rows
    that are zero."""
    workers, calls = 3, 9

    def main(rank, world):
        groups = DataGroups({DATA_AXES: world.group("dp", range(workers), rank)})
        parameters, settings = [], settings_of("onebit_adam", 1, bucket=300)[1]
        for name, w in weights().items():
            parameters.append(nn.Parameter(w))
            parameters[-1].spec = ParamSpec(name, tuple(w.shape), Init("zeros"))
        [plan] = plan_parameters(parameters, settings, groups, ParameterUse())
        mean = CompressedMean(
            plan, [parameters[i] for i in plan.members], groups, torch.device("cpu")
        )
        given, received = torch.zeros(plan.layout.numel), torch.zeros(plan.layout.numel)
        for call in range(calls):
            x = torch.zeros(plan.layout.numel)
            for slot in plan.layout.slots:
                x[slot.start : slot.stop] = share(rank, workers, call, slot.name).view(
                    -1
                )
            given += x
            mean.reduce_(x)
            received += x
        by_shard = torch.zeros(plan.layout.numel)
        for piece in plan.layout.slot_intersections(rank):
            by_shard[piece.flat : piece.flat + piece.padded_numel] = mean.server_error[
                piece.offset : piece.offset + piece.padded_numel
            ]
        return given, received, mean.worker_error, by_shard

    ranks = run_ranks(workers, main)
    given, errors = (sum(of_rank[i] for of_rank in ranks) / workers for i in (0, 2))
    assert all(torch.equal(of_rank[1], ranks[0][1]) for of_rank in ranks)
    server = sum(of_rank[3] for of_rank in ranks)
    torch.testing.assert_close(
        ranks[0][1], given - errors - server, rtol=1e-5, atol=1e-5
    )
    assert errors.any() and server.any()


def test_one_rank_adds_what_several_have_not_sent_and_compresses_nothing():
    """The rank has errors of other ranks' exchanges, as after a load."""
    groups, settings = DataGroups({DATA_AXES: solo()}), settings_of("onebit_adam", 1)[1]
    parameters = [nn.Parameter(w) for w in weights().values()]
    for p, name in zip(parameters, SHAPES):
        p.spec = ParamSpec(name, SHAPES[name], Init("zeros"))
    [plan] = plan_parameters(parameters, settings, groups, ParameterUse())
    mean = CompressedMean(
        plan, [parameters[i] for i in plan.members], groups, torch.device("cpu")
    )
    mean.worker_error.fill_(0.5)
    mean.server_error.fill_(0.25)
    x = torch.ones(plan.layout.numel)
    mean.reduce_(x)
    assert torch.equal(x, torch.full_like(x, 1.75))
    mean.reduce_(x)
    assert torch.equal(x, torch.full_like(x, 1.75))


def test_an_engine_takes_deepspeeds_types_and_continues_with_the_same_bits(tmp_path):
    def trained(engine, first, steps):
        for microbatches in batches(first + steps, 2, 2, engine.global_rank)[first:]:
            for tokens in microbatches:
                engine.backward(loss_of(engine, tokens))
                engine.step()
        return engine_weights(engine)

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}},
    }

    def run(rank, world):
        start = lambda: megatron_ds.initialize(
            model=module_of(Stack),
            config=config,
            model_parameters=None,
            mpu=Mesh(Grid.fit(2), rank, world.connect),
        )[0]
        engine = start()
        trained(engine, 0, 4)
        state, before = engine.optimizer.state_dict(), engine_weights(engine)
        engine.save_checkpoint(tmp_path)
        expected = trained(engine, 4, 2)
        again = [start(), start()]
        again[0].optimizer.load_state_dict(state)
        again[1].load_checkpoint(tmp_path)
        found = [engine_weights(engine) for engine in again]
        return before, found, expected, [trained(engine, 4, 2) for engine in again]

    for before, found, expected, continued in run_ranks(2, run):
        for name in before:
            assert all(torch.equal(before[name], weights[name]) for weights in found)
            assert all(
                torch.equal(expected[name], weights[name]) for weights in continued
            )
        assert any(not torch.equal(before[name], expected[name]) for name in before)
