"""Ranks that call `initialize` with different settings, optimizers or modules: an error that names them."""

import pytest
import torch

import megatron_ds
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.engine_runs import Stack, config_of, make
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def changed(**changes):
    """The configuration of stage 1 for two ranks, with other values at "block.key"."""
    config = config_of(1, 2)
    for path, value in changes.items():
        *blocks, key = path.split("__")
        inner = config
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[key] = value
    return config


def errors_of(arguments):
    """The text of the error of `initialize` on each rank. arguments: of each rank, besides mpu."""

    def run(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        with pytest.raises(ConfigError) as caught:
            megatron_ds.initialize(mpu=mesh, **arguments[rank])
        return str(caught.value)

    return run_ranks(2, run)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"optimizer__params__lr": 0.02}, ("lr is 0.01 on rank 0", "0.02 on rank 1")),
        (
            {"optimizer__params__weight_decay": 0.0},
            ("weight_decay is 0.1 on rank 0", "0.0 on rank 1"),
        ),
        (
            {"optimizer__params__adam_w_mode": False, "optimizer__type": "Adam"},
            ("optimizer.params.adam_w_mode is true on rank 0", "false on rank 1"),
        ),
        (
            {"gradient_clipping": 1.0},
            ("gradient_clipping is 0.5 on rank 0", "1.0 on rank 1"),
        ),
        (
            {"bf16__enabled": True},
            ("bf16.enabled is false on rank 0", "true on rank 1"),
        ),
        (
            {"zero_optimization__stage": 2},
            ("zero_optimization.stage is 1 on rank 0", "2 on rank 1"),
        ),
        (
            {"gradient_accumulation_steps": 2},
            ("train_micro_batch_size_per_gpu is 6 on rank 0", "2 steps"),
        ),
        (
            {"zero_optimization__reduce_bucket_size": 999},
            ("zero_optimization.reduce_bucket_size is", "999 on rank 1"),
        ),
        (
            {"zero_optimization__stage": 3},
            ("zero_optimization.stage is 1 on rank 0", "3 on rank 1"),
        ),
    ],
)
def test_another_config_on_one_rank(change, words):
    one, other = errors_of(
        [
            {"model": make(), "config": config}
            for config in (changed(), changed(**change))
        ]
    )
    assert one == other and one.startswith(
        "the ranks gave initialize different settings: "
    )
    assert all(word in one for word in words)


def test_another_rate_of_the_programs_own_optimizer():
    config = changed()
    del config["optimizer"]
    modules = [make(), make()]
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, beta))
        for module, beta in zip(modules, (0.9, 0.95))
    ]
    one, other = errors_of(
        [
            {"model": module, "optimizer": optimizer, "config": config}
            for module, optimizer in zip(modules, optimizers)
        ]
    )
    assert one == other and "betas of parameter group 0 is [0.9, 0.9] on rank 0" in one


def test_another_module_on_one_rank():
    one, other = errors_of(
        [{"model": module, "config": changed()} for module in (make(Stack), make())]
    )
    assert one == other and "different modules" in one


def test_files_of_logs_may_differ(tmp_path):
    def run(rank, world):
        mesh = Mesh(Grid.fit(2), rank, world.connect)
        config = changed(
            csv_monitor__enabled=True,
            csv_monitor__output_path=str(tmp_path / str(rank)),
        )
        engine, *_ = megatron_ds.initialize(
            model=modules[rank], config=config, mpu=mesh
        )
        return engine.global_rank

    modules = [make(), make()]
    assert run_ranks(2, run) == [0, 1]
