"""A training of which a rank fails in some starts: pretrain_gpt.py with SPOIL, JSON {"START": [rank, step, how]}.

The rank fails at the beginning of the step; in a start that SPOIL does not name, none does.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ds.training import trainer  # noqa: E402
from megatron_ds.training.pretrain import pretrain  # noqa: E402


def loop() -> None:
    while True:
        pass


HOW = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loop": loop,
    "raise": lambda: 1 / 0,
    "exit 2": lambda: os._exit(2),
}


def spoil(rank: int, step: int, how: str) -> None:
    train_step = trainer.train_step

    def spoiled(engine, batch, progress, **values):
        if engine.mesh.rank == rank and progress.step == step:
            HOW[how]()
        return train_step(engine, batch, progress, **values)

    trainer.train_step = spoiled


def slow_down(seconds: float) -> None:
    """Steps take longer, so that something can happen between them."""
    train_step = trainer.train_step

    def slow(*arguments, **values):
        time.sleep(seconds)
        return train_step(*arguments, **values)

    trainer.train_step = slow


if __name__ == "__main__":
    wanted = json.loads(os.environ.get("SPOIL", "{}"))
    start = os.environ.get("MEGATRON_DS_RESTARTS", "0")
    if start in wanted or "all" in wanted:
        spoil(*wanted.get(start, wanted.get("all")))
    slow_down(float(os.environ.get("SLOW", "0")))
    sys.exit(pretrain(model="gpt"))
