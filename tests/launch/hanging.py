"""A program for the ranks of the launcher's tests: it writes places, and rank 1 does not go on.

python hanging.py stop|loop|pause
"""

import os
import signal
import sys
import time
from pathlib import Path

from megatron_ds.host import places

rank = int(os.environ["RANK"])
places.open_places(os.environ, rank)
writer = places.writer()
Path(f".at-work-{rank}").touch()
while not all(
    Path(f".at-work-{r}").exists() for r in range(int(os.environ["WORLD_SIZE"]))
):
    time.sleep(0.05)
for step in range(1, 4):
    writer.instruction("F", 0, 0)
    time.sleep(0.05)
    writer.step(step)
if rank == 1:
    writer.instruction("F", 0, 2)
    if sys.argv[-1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while sys.argv[-1] == "loop":
        pass
    # It is slow only: it goes on when it has been named, until that has been noticed.
    while not Path("is-named").exists():
        time.sleep(0.05)
    while not Path("moves").exists():
        writer.instruction("F", 0, 3)
        time.sleep(0.05)
    sys.exit()
writer.instruction("B", 0, 2)
writer.collective("all_reduce", "dp")
with places.WAITING:
    while not Path("moves").exists():
        time.sleep(0.05)
