"""Child of `test_early_deaths.py`: a run dies by SIGKILL before its first checkpoint, and its command runs again.

Run as `python -m tests.launch.early_deaths FOLDER WAY PRETRAINED POINT ...`. torch is imported once; each start is a
fork with one rank, in the environment that the way of starting gives it. Losses and weights at the end must be those
of the undisturbed run, to the bit. Prints the points that were tried.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint  # noqa: F401  before the forks
from torch import nn

import megatron_ds
from megatron_ds.checkpoint import folder as folders
from megatron_ds.checkpoint import save as saves
from megatron_ds.compat.engine import Engine, checkpoint
from megatron_ds.training import evaluations, pretrain, trainer
from tests.harness.deaths import die_at_change, die_in_call, forked, survived
from tests.harness.pretraining import TINY, losses, same_bits, saved_state

STEPS = 4
SAVED = 3  # step of the first checkpoint
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
AGENT = {**RANK, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
LAUNCH = {**RANK, "MEGATRON_DS_LAUNCH": "0f", "MEGATRON_DS_RUN": "0123abcd"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "localhost",
}
# Way → environments of the first start and of the second.
WAYS = {
    "plain": ({}, {}),
    "torchrun": (AGENT, AGENT),
    "torchrun --max-restarts": (AGENT, AGENT | {"TORCHELASTIC_RESTART_COUNT": "1"}),
    "slurm": (SLURM, SLURM),
    "launch": (
        LAUNCH | {"MEGATRON_DS_RESTARTS": "0"},
        LAUNCH | {"MEGATRON_DS_RESTARTS": "1"},
    ),
    "launch --load": (
        LAUNCH | {"MEGATRON_DS_RESTARTS": "0"},
        LAUNCH | {"MEGATRON_DS_RESTARTS": "1"},
    ),
    "engine": ({}, {}),
}
_in_first_save = lambda n: (
    lambda: _when_called(saves.Saving, "write", lambda: die_at_change(n))
)
# Point → what makes a process die there; those of saves hold for engines, too.
SAVE_POINTS = {
    "the save begins": lambda: die_in_call(saves.Saving, "begin"),
    "the first file of tensors": _in_first_save(1),
    "the index": _in_first_save(2),
    "run.json": lambda: die_in_call(saves, "write_run_file"),
    "before the rename": lambda: die_in_call(folders, "publish"),
    "between rename and tracker": lambda: _when_called(
        folders, "publish", lambda: die_in_call(folders, "sync_directory", 2)
    ),
    "behind the tracker": lambda: die_in_call(saves, "prune"),
}
TRAINING_POINTS = {
    "before the folder is locked": lambda: die_in_call(pretrain, "save_folder"),
    "the folder is locked": lambda: die_in_call(pretrain, "find_start"),
    "the data are open": lambda: die_in_call(pretrain, "build_replica"),
    "before the metrics": lambda: die_in_call(pretrain, "open_log"),
    "first step": lambda: die_in_call(trainer, "train_step"),
    "first line": lambda: die_in_call(trainer, "train_step", 2),
    "first evaluation": lambda: die_in_call(evaluations, "evaluate"),
    **SAVE_POINTS,
}
ENGINE_POINTS = {
    "nothing is trained": lambda: die_in_call(EngineProgram, "run"),
    "nothing is loaded": lambda: die_in_call(Engine, "load_checkpoint"),
    "first step": lambda: die_in_call(EngineProgram, "step"),
    "second step": lambda: die_in_call(EngineProgram, "step", 2),
    **SAVE_POINTS,
    "before latest": lambda: die_in_call(checkpoint, "write_durably"),
}


def points_of(way: str) -> dict[str, Callable[[], None]]:
    """The points at which a start of this way can die."""
    return ENGINE_POINTS if way == "engine" else TRAINING_POINTS


def _when_called(owner: object, name: str, prepare: Callable[[], None]) -> None:
    """Call `prepare` before the next call of `owner.name`."""
    real = getattr(owner, name)

    def prepared(*arguments, **options):
        setattr(owner, name, real)
        prepare()
        return real(*arguments, **options)

    setattr(owner, name, prepared)


def train(way: str, save: Path, base: Path | None, steps: int = STEPS) -> None:
    """The command of a training script."""
    words = [*TINY, "--mock-data", "--train-iters", str(steps), "--save", str(save)]
    words += ["--lr-decay-iters", "9", "--save-interval", str(SAVED)]
    words += ["--eval-interval", "2", "--eval-iters", "1"]
    if way != "launch":
        words += ["--load", str(save)]
    if base:
        words += ["--pretrained-checkpoint", str(base)]
    assert pretrain.pretrain(words, model="gpt") == 0


class EngineProgram:
    """A user's program around an engine: it loads what is there, and trains and saves."""

    def __init__(self, save: Path, base: Path | None):
        torch.manual_seed(7)
        adam = {"type": "AdamW", "params": {"lr": 1e-2}}
        self.save = str(save)
        self.engine, *_ = megatron_ds.initialize(
            model=nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
            config={"train_batch_size": 2, "optimizer": adam},
        )
        path, _ = self.engine.load_checkpoint(self.save)
        if path is None and base is not None:
            self.engine.load_checkpoint(str(base), load_module_only=True)

    def step(self, number: int) -> None:
        """Train on a batch that follows from the number of the step."""
        draw = torch.Generator().manual_seed(number)
        loss = self.engine(torch.randn(2, 7, generator=draw)).square().mean()
        self.engine.backward(loss)
        self.engine.step()

    def run(self, steps: int) -> None:
        """Train to a step, with checkpoints at SAVED and at the end."""
        for number in range(self.engine.global_steps, steps):
            self.step(number)
            if number + 1 in (SAVED, steps):
                self.engine.save_checkpoint(self.save)


def start(way: str, save: Path, base: Path | None, steps: int = STEPS) -> None:
    """One start of the command."""
    if way == "engine":
        EngineProgram(save, base).run(steps)
    else:
        train(way, save, base, steps)


def begun(log: Path, environment: dict[str, str], action: Callable[[], None]) -> bool:
    """Whether a fork with this environment comes to its end. log: of its output"""

    def inside() -> None:
        os.environ.update(environment)
        with log.open("w") as file, contextlib.redirect_stdout(file):
            os.dup2(file.fileno(), 1)
            action()

    return survived(forked(inside))


def main() -> None:
    folder = Path(sys.argv[1])
    way = sys.argv[2]
    points = sys.argv[4:]
    log = folder / "log"
    base = None
    # The undisturbed run, and the weights with which it may begin.
    if sys.argv[3] == "pretrained":
        assert begun(log, {}, lambda: start(way, folder / "base", None, 1))
        base = folder / "base"
    environments = WAYS[way]
    undisturbed = folder / "undisturbed"
    assert begun(log, environments[0], lambda: start(way, undisturbed, base))
    right = saved_state(undisturbed, STEPS)
    # A death at each point, and the same command again.
    for point in points:
        save = folder / "save"
        die = points_of(way)[point]
        dying = lambda: (die(), start(way, save, base))  # noqa: B023
        assert not begun(log, environments[0], dying), f"no death: {point}"
        again = lambda: start(way, save, base)  # noqa: B023
        assert begun(log, environments[1], again), f"{point}: it did not begin again"
        assert same_bits(saved_state(save, STEPS), right), f"{point}: other weights"
        if way != "engine":
            assert losses(save) == losses(undisturbed), f"{point}: other losses"
        shutil.rmtree(save)
        print(point)


if __name__ == "__main__":
    main()
