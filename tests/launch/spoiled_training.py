"""A training of which a rank fails in some starts: pretrain_gpt.py with SPOIL, JSON {"START": [rank, step, how]}.

The rank fails at the beginning of the step, or so many seconds later if SPOIL has them as a fourth value; in a start
that SPOIL does not name, none does.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_ds.checkpoint.save import Saving  # noqa: E402
from megatron_ds.training import trainer  # noqa: E402
from megatron_ds.training.pretrain import pretrain  # noqa: E402


def loop() -> None:
    while True:
        pass


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_newest() -> None:
    """The largest file of the newest checkpoint loses its second half, and the rank dies."""
    newest = max(Path("save").glob("iter_*"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    kill()


def fill_disk() -> None:
    """Files can have 50 kB from now on: metrics fit, and no checkpoint."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))


def write_slowly() -> None:
    """A file of a checkpoint takes seconds, and the rank dies at the second one: two saves follow the latest fault."""
    write = Saving.write
    left = [2]

    def slowly(*arguments):
        left[0] -= 1
        if not left[0]:
            threading.Timer(1.0, kill).start()
        time.sleep(2.0)
        return write(*arguments)

    Saving.write = slowly


HOW = {
    "end": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "cut": cut_newest,
    "full": fill_disk,
    "slow": write_slowly,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": kill,
    "loop": loop,
    "raise": lambda: 1 / 0,
    "exit 2": lambda: os._exit(2),
}


def spoil(rank: int, step: int, how: str, later: float = 0.0) -> None:
    train_step = trainer.train_step
    timer = threading.Timer(later, HOW[how])

    def spoiled(replica, batch, progress, **values):
        if replica.mesh.rank == rank and progress.step == step:
            if later:
                timer.start()
            else:
                HOW[how]()
        # A fast machine has not trained to the end before it happens.
        is_near_the_end = progress.step >= replica.config.train.train_iters - 2
        if timer.is_alive() and is_near_the_end:
            timer.join()
        return train_step(replica, batch, progress, **values)

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
