"""A job on ranks as threads that saves a checkpoint, and goes on from one at another layout."""

from contextlib import closing

import torch

from megatron_ds.checkpoint.load import read_run
from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_learning_rate
from megatron_ds.models.identity import model_identity
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.run_checkpoint import load_run, save_run
from megatron_ds.training.start import Start
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import mock_samples, open_loader, parse_layout
from tests.harness.pretraining import saved_state
from tests.harness.threads import run_ranks

HALF, STEPS, BATCH = 2, 4, 4


def run(job, layout, folder, steps, begin=0, visit=lambda replica: None):
    """Train from step `begin` (of the checkpoint in `folder`) to step `steps`, and save there. Returns the
    losses of rank 0, and what `visit` makes of each rank's replica."""
    request = parse_layout(layout, mbs="1")
    config = parse(
        [*job, *request.flags, "--load", str(folder), "--save", str(folder)],
        world_size=request.world_size,
    )
    samples, rate = mock_samples(config, 4 * BATCH, seed=1), make_learning_rate(config)

    def main(rank, world):
        mesh = Mesh(
            config.grid(request.world_size), rank, world.connect, torch.device("cpu")
        )
        replica, progress, losses = build_replica(config, mesh), Progress(), []
        if begin:
            progress = load_run(replica, Start(begin, read_run(folder, begin), "id"))
        with closing(open_loader(config, samples, mesh)) as loader:
            while progress.step < steps:
                outcome = train_step(
                    replica,
                    replica.batches.training(loader, progress, BATCH),
                    progress,
                    learning_rate=rate(progress),
                    weight_decay=0.1,
                )
                progress = progress.after(BATCH, BATCH * config.model.seq_length)
                losses.append(outcome.loss)
        save_run(
            replica, progress, {"identity": {"model": model_identity(config.model)}}
        )
        return losses, visit(replica)

    results = run_ranks(request.world_size, main)
    return results[0][0], [visited for _, visited in results]


def resaved(folder, tmp_path, job, layout):
    """All logical tensors after a load by another layout, and a save by it."""
    step = f"iter_{HALF:07d}"
    (tmp_path / step).symlink_to(folder / step)
    path = tmp_path / "again"
    path.mkdir()
    (path / step).symlink_to(folder / step)
    run(job, layout, path, HALF, begin=HALF)
    assert not (path / step).is_symlink()
    return saved_state(path, HALF)
