"""Real ranks with one bit an element against the loop over workers of `tests/harness/onebit_simulator.py`."""

import pytest
import torch
from torch import nn

from megatron_ds.config import OptimizerConfig
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import OPTIMIZERS, RegisteredOptimizer, default_groups
from megatron_ds.zero.compressed_mean import CompressedMean
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.set_plan import ParameterUse, plan_parameters
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.onebit_simulator import SimulatedMean, SimulatedRun
from tests.harness.threads import run_ranks

SHAPES = {"rows": (12, 7), "matrix": (40, 9), "cube": (3, 5, 20), "vector": (70,)}
EMPTY, OF_ONE = 3, 5            # rows: without any gradient, with one on the last worker only
STEPS, LR, DECAY, CLIP = 14, 0.02, 0.1, 8.0
OPTIONS = {"onebit_adam": dict(freeze_step=5), "onebit_lamb": dict(freeze_step=5, lamb_min_coeff=0.02),
           "zero_one_adam": dict(var_freeze_step=6, var_update_scaler=2, local_step_scaler=3,
                                 local_step_clipper=2)}


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
        parameters[-1].spec = ParamSpec(name, tuple(w.shape), Init("zeros"), decay=name != "vector")
    return parameters, ZeroOptimizer(parameters, settings, groups, ParameterUse({0: [parameters]}))


def settings_of(name, stage, bucket=None, corrects=True):
    config = OptimizerConfig(optimizer=name, adam_bias_correction=corrects, adam_beta2=0.99, **OPTIONS[name])
    return config, ZeroSettings(default_groups(RegisteredOptimizer(name, config)), STAGES[stage],
                                bucket_elements=bucket, clip_grad=CLIP)


def one_step(optimizer, parameters, rank, workers, step):
    optimizer.begin_step()
    optimizer.arm()
    for p in reversed(parameters):
        p.main_grad.add_(share(rank, workers, step, p.spec.name))
        p.grad_ready()
    return optimizer.step(LR, DECAY).grad_norm


def real(name, stage, workers, bucket, corrects):
    _, settings = settings_of(name, stage, bucket, corrects)

    def main(rank, world):
        parameters, optimizer = make(settings, DataGroups({DATA_AXES: world.group("dp", range(workers), rank)}))
        norms, planned = [], 0
        for step in range(STEPS):
            norms.append(one_step(optimizer, parameters, rank, workers, step))
            world.traffic[rank].clear()
        return {p.spec.name: p.detach().clone() for p in parameters}, norms

    return run_ranks(workers, main)


def simulated(name, workers, corrects):
    config, _ = settings_of(name, 0)
    runs = {}
    for decay in (DECAY, 0.0):
        runs[decay] = SimulatedRun(
            name, OPTIMIZERS[name].phases(config), weights(), workers, lr=LR, weight_decay=decay, clip=CLIP,
            betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, corrects=corrects,
            min_coeff=config.lamb_min_coeff, max_coeff=config.lamb_max_coeff, coeff_beta=config.coeff_beta,
            factor_max=config.factor_max, factor_min=config.factor_min,
            factor_threshold=config.factor_threshold)
    norms = []
    for step in range(STEPS):
        shares = [{n: share(i, workers, step, n) for n in SHAPES} for i in range(workers)]
        for run in runs.values():
            run.step(shares)
        norms.append(runs[DECAY].grad_norm)
    of = lambda n, worker: runs[0.0 if n == "vector" else DECAY].weights_of(worker)[n]
    return [({n: of(n, i) for n in SHAPES}, norms) for i in range(workers)]


@pytest.mark.parametrize("name, stage, workers, bucket, corrects", [
    ("onebit_adam", 0, 2, None, True), ("onebit_adam", 1, 3, 300, False), ("onebit_adam", 0, 1, None, True),
    ("onebit_lamb", 0, 4, 300, True), ("onebit_lamb", 1, 2, None, False),
    ("zero_one_adam", 0, 2, None, False), ("zero_one_adam", 0, 4, 300, True)])
def test_ranks_do_what_the_simulated_workers_do(name, stage, workers, bucket, corrects):
    expected = simulated(name, workers, corrects)
    for (got, norms), (want, want_norms) in zip(real(name, stage, workers, bucket, corrects), expected):
        assert norms == pytest.approx(want_norms, rel=1e-6)
        for n in SHAPES:
            torch.testing.assert_close(got[n], want[n], rtol=1e-6, atol=2e-6)
        assert not got["rows"][EMPTY].any()
    of_first = expected[0][0]
    assert all(not torch.allclose(of_first[n], w) for n, w in weights().items())
