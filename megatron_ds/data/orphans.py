"""Processes that end when the one that started them is gone, killed perhaps, and can no longer tell them to."""

import os
import threading
import time

SECONDS = 1.0


def end_with_parent() -> None:
    """Watch over the parent from a thread of this process; end it, without any clearing up, within a second or so."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
