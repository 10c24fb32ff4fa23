"""A program for the ranks of the launcher's tests: it writes places, and rank 1 does not go on.

python hanging.py stop|loop|pause
"""

import os
import signal
import sys
import time

from megatron_ds.host import places

PAUSE = 4  # seconds
rank = int(os.environ["RANK"])
places.open_places(os.environ, rank)
writer = places.writer()
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
    # It was slow only, and goes on until the others have ended.
    time.sleep(PAUSE)
    for _ in range(20 * PAUSE):
        writer.instruction("F", 0, 3)
        time.sleep(0.05)
    sys.exit()
writer.instruction("B", 0, 2)
writer.collective("all_reduce", "dp")
with places.WAITING:
    time.sleep(1.5 * PAUSE if sys.argv[-1] == "pause" else 600)
