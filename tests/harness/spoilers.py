"""Accidents for ranks that train (`pretraining.run_pretrain`), at moments that only the process itself can
hit exactly.

Each is a context manager called as `spoiler(rank, ...)` on every rank; what it changes is as before
afterwards.
"""

import contextlib
import fcntl
import json
import signal

import pytest
import torch

from tests.harness.limits import files_of_at_most


@contextlib.contextmanager
def signal_at_step(rank: int, *, number: int, step: int, victim: int):
    """The victim sends itself the signal while it computes its `step`-th step."""
    from megatron_ds.training import trainer

    real = trainer.train_step

    def train_step(replica, batch, progress, **options):
        if rank == victim and progress.step + 1 == step:
            signal.raise_signal(number)
        return real(replica, batch, progress, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", train_step)
        yield


@contextlib.contextmanager
def samples_logged(rank: int, *, path, kill_at: int | None = None, victim: int = 0):
    """Each step a line is added to `path`: step, rank, place in the stream and tokens of each sample that is
    trained on.

    kill_at: the victim dies by SIGKILL within that step, after the line is written.
    """
    from megatron_ds.training import trainer

    real = trainer.train_step

    def train_step(replica, batch, progress, **options):
        step = progress.step + 1
        rows = [
            [place, row]
            for place, row in zip(batch.sample_ids, batch.tokens.tolist(), strict=True)
        ]
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps([step, replica.mesh.coordinate("dp"), rows]) + "\n")
        if step == kill_at and rank == victim:
            signal.raise_signal(signal.SIGKILL)
        return real(replica, batch, progress, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", train_step)
        yield


@contextlib.contextmanager
def signal_in_evaluation(rank: int, *, number: int, victim: int):
    """The victim sends itself the signal in the first forward pass of an evaluation."""
    from megatron_ds.pipeline.executor import Executor

    real = Executor.forward

    def forward(self, microbatches):
        if rank == victim:
            signal.raise_signal(number)
        return real(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "forward", forward)
        yield


@contextlib.contextmanager
def signal_outside_the_loop(rank: int, *, number: int, at: str, victim: int):
    """The victim sends itself the signal in start-up ("read_flags", "build_replica", "_load")
    or after the last save ("close")."""
    from megatron_ds.mpu.mesh import Mesh
    from megatron_ds.training import pretrain

    owner = Mesh if at == "close" else pretrain
    real = getattr(owner, at)

    def signalled(*arguments):
        if rank == victim:
            signal.raise_signal(number)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, at, signalled)
        yield


@contextlib.contextmanager
def killed_in_save(rank: int, *, step: int, change: int, victim: int):
    """The victim dies by SIGKILL just before its `change`-th change of the file system in the save of
    `step`."""
    from megatron_ds.training import saves
    from tests.checkpoint.crashing_saves import die_at_change

    real = saves.save_run

    def save_run(replica, progress, description):
        if rank == victim and progress.step == step:
            die_at_change(change)
        real(replica, progress, description)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "save_run", save_run)
        yield


@contextlib.contextmanager
def state_written_instead_of_training(rank: int, *, path):
    """What a run of one rank holds once everything is built and loaded: (progress, {kind/name: values})."""
    from megatron_ds.training.run_checkpoint import all_pieces
    from megatron_ds.training.trainer import Trainer

    def run(self):
        state = {
            f"{p.kind}/{p.spec.name}": p.tensor.view(p.spec.shape).clone()
            for p in all_pieces(self.replica)
        }
        torch.save((self.progress.to_dict(), state), path)
        return "finished"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", run)
        yield


@contextlib.contextmanager
def poisoned(rank: int, *, module: str, samples: range, value: float):
    """The output of a named module becomes not a number, or infinite, whenever it sees one of these
    samples."""
    from megatron_ds.training import pretrain

    real = pretrain.build_replica

    def build_replica(config, mesh, planned):
        replica = real(config, mesh, planned)
        if module in replica.layers:
            replica.layers[module][1].register_forward_hook(poison)
        return replica

    def poison(block, inputs, output):
        bad = [i for i, sample in enumerate(inputs[1].sample_ids) if sample in samples]
        if bad and inputs[1].training:
            output = output.clone()
            output[0, bad, 0] = value
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "build_replica", build_replica)
        yield


@contextlib.contextmanager
def files_limited(rank: int, *, size: int):
    """No file can grow beyond `size` bytes: writes fail as on a full disk."""
    with files_of_at_most(size):
        yield


@contextlib.contextmanager
def spoiled_weight(rank: int, *, step: int, victim: int, value: float):
    """After that step the victim has the value in the first weight that it keeps for the optimizer."""
    from megatron_ds.training import trainer

    real = trainer.train_step

    def train_step(replica, batch, progress, **options):
        outcome = real(replica, batch, progress, **options)
        if rank == victim and progress.step + 1 == step:
            weights = [
                piece.tensor
                for piece in replica.optimizer.pieces()
                if piece.kind == "weight"
            ]
            next(filter(len, weights))[0] = value
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", train_step)
        yield


@contextlib.contextmanager
def in_a_folder_of_its_own(rank, folder, read_bytes=None):
    """The working directory of a rank.

    read_bytes: of copies that are read before training, with no sample; None: as always
    """
    from megatron_ds.training import data_facts, file_copies

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(f"{folder}/node{rank}")
        if read_bytes is not None:
            patch.setattr(file_copies, "READ_BYTES", read_bytes)
            patch.setattr(data_facts, "LOOKED_AT", 0)
        yield
