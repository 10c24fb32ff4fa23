"""Processes that end when the one that started them is gone, killed perhaps, and can no longer tell them to."""

import os
import threading
import time

SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Watch over the parent from a thread of this process; end it, without any clearing up, within a second or so.

    parent: the process id of the parent, which may be gone before this process has begun.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
