"""Folders that DeepSpeed wrote, made once per test session, and our next step after them."""

import functools
import importlib.util
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import megatron_ds
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness import deepspeed_modules as modules
from tests.harness import deepspeed_runs as runs
from tests.harness.threads import run_ranks
from tests.harness.warm import warm_python

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None,
                                     reason="DeepSpeed is not installed: pip install deepspeed")


@functools.cache
def made() -> Path:
    """The folder with all of `runs.CASES`."""
    keeper = made.keeper = tempfile.TemporaryDirectory(prefix="deepspeed-")
    run_deepspeed("make", keeper.name)
    return Path(keeper.name)


def run_deepspeed(*words: str) -> None:
    """The program of `deepspeed_runs` with these words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run([warm_python(), "-m", "tests.harness.deepspeed_runs", port, *map(str, words)],
                          env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}, timeout=280,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def next_step(path: Path) -> dict:
    """loss, before, after of DeepSpeed's step after a checkpoint; of a pipeline, of all stages together."""
    first, second = (torch.load(path.with_name(f"{path.name}{rank}")) for rank in range(runs.RANKS))
    return first | {"before": second["before"] | first["before"], "after": second["after"] | first["after"],
                    "logits": None if first["logits"] is None else
                    torch.cat([first["logits"], second["logits"]])}


def engine_config(case: str, stage: int, ranks: int) -> dict:
    """The JSON of `case` for another stage and number of ranks."""
    config = runs.config_of(stage, {k: v for k, v in runs.CASES[case][2].items() if k != "data_types"})
    del config["zero_force_ds_cpu_optimizer"], config["optimizer"]["params"]["torch_adam"]
    return config | {"train_micro_batch_size_per_gpu": 4 // ranks}


def our_next_step(case: str, folder: Path, stage: int, ranks: int, **options
                  ) -> tuple[float, dict[str, torch.Tensor], tuple]:
    """(loss, weights, (engine's counters, client state)) of our engine, which loads the checkpoint first."""
    drawn = [runs.CASES[case][0]() for _ in range(ranks)]       # threads share torch's random state

    def main(rank, world):
        mesh = Mesh(Grid.fit(ranks), rank, world.connect)
        engine, *_ = megatron_ds.initialize(model=drawn[rank], mpu=mesh,
                                            config=engine_config(case, stage, ranks),
                                            model_parameters=runs.groups_of(drawn[rank]))
        path, client = engine.load_checkpoint(folder, **options)
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()[0],
                    engine.optimizer.loss_scale)
        tokens = modules.tokens_of(runs.STEPS, vocab=11).chunk(ranks)[rank]
        loss = modules.loss_of(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)
        engine.step()
        with engine.gathered_parameters():
            low = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
        masters = {piece.spec.name: piece.tensor.clone() for piece in engine.optimizer.pieces()
                   if piece.kind == "weight" and piece.tensor.numel() == piece.spec.numel}
        whole = {name: masters[name].view(p.shape) if name in masters else p for name, p in low.items()}
        return loss.item(), whole, (counters, client, path)

    found = run_ranks(ranks, main)
    return sum(loss for loss, *_ in found) / ranks, found[0][1], found[0][2]
