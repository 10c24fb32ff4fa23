"""Child of `test_checkpoint_crash.py`: saves in forked processes that die by SIGKILL, then loads what is
left.

Run as `python -m tests.checkpoint.crashing_saves FOLDER SEED`. torch is imported once; each save is a fork. A
process dies either at its n-th change of the file system, for every n until it survives, or, after a finished
save, at a random time that is drawn in units of a measured save. After each death the state on disk must be
that of the last save that was reported done, or of the one that was going on; nothing else.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint  # noqa: F401  before the forks

from megatron_ds.checkpoint.background_save import BackgroundSave, Copies
from megatron_ds.checkpoint.folder import steps_in
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.save import Saving
from megatron_ds.mpu.group import solo
from tests.harness.deaths import die_at_change, forked, survived
from tests.harness.states import Layout, pieces_of, save_step

MOST_CHANGES = 200


def save_behind(folder: Path, step: int, seed: int, limit: int | None = None) -> None:
    """The same in the background, published at once."""
    pieces = pieces_of(Layout(), 0, seed)
    saving = Saving(folder, step, {}, solo(), limit)
    BackgroundSave(saving, pieces, {"seed": seed}, Copies()).finish()


def loaded_seed(folder: Path) -> int:
    """Load what `latest` finds, compare every bit, and say whose state it is."""
    step = latest(folder)
    seed = read_run(folder, step)["seed"]
    pieces = pieces_of(Layout(), 0, seed=None)
    load(folder, step, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, seed), strict=True):
        assert torch.equal(piece.tensor, right.tensor), f"iteration {step} is damaged"
    return seed


def die_everywhere(
    base: Path, step: int, limit: int | None, saves: Callable = save_step
) -> int:
    """One save of `step` over a folder holding 10 and 20, dying at each change in turn; how many changes
    there are."""
    for n in range(1, MOST_CHANGES):
        folder = base / "now"
        shutil.copytree(base / "start", folder)
        done = survived(
            forked(
                lambda: (
                    die_at_change(n),  # noqa: B023
                    saves(folder, step, seed=99, limit=limit),  # noqa: B023
                )
            )
        )
        found = loaded_seed(folder)
        assert found == 99 if done else found in (20, 99), (
            f"death at change {n}: loaded {found}"
        )
        save_step(folder, 40, seed=40, limit=limit)
        assert loaded_seed(folder) == 40
        assert not [p for p in folder.iterdir() if p.name.startswith(".iter")], (
            "a leftover stays"
        )
        if limit == 2:
            assert len(steps_in(folder)) == 2
        shutil.rmtree(folder)
        if done:
            return n - 1
    raise AssertionError("the save never ends")


def die_sometime(
    folder: Path, draw: random.Random, times: int, saves: Callable = save_step
) -> int:
    """Saves one after the other, killed at a random moment after the first or second; how many saves went
    through in all.

    The moment is drawn as a multiple of what a save takes on this machine, so a slow machine is killed inside
    saves too.
    """
    seed, begin = 1, time.monotonic()
    save_step(folder, 1, seed=1)
    seconds = time.monotonic() - begin
    for _ in range(times):
        report, told = os.pipe()

        def save_on():
            for k in range(seed + 1, seed + 1000):  # noqa: B023
                saves(folder, k, seed=k, limit=3)
                os.write(told, b".")  # noqa: B023

        process = forked(save_on)
        os.close(told)
        finished = len(b"".join(os.read(report, 1) for _ in range(draw.randint(1, 2))))
        time.sleep(draw.uniform(0.0, 2.0) * seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        done = seed + finished + len(os.read(report, 4096))
        os.close(report)
        seed = loaded_seed(folder)
        assert seed in (done, done + 1), f"{done} was reported done, {seed} was loaded"
    return seed


def main() -> None:
    base, draw = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    torch.set_num_threads(1)
    for seed in (10, 20):
        save_step(base / "start", seed, seed=seed)
    print(
        die_everywhere(base, 30, limit=2),
        die_everywhere(base, 20, limit=None),
        die_everywhere(base, 30, limit=2, saves=save_behind),
        die_sometime(base / "random", draw, times=12),
        die_sometime(base / "behind", draw, times=12, saves=save_behind),
    )


if __name__ == "__main__":
    main()
