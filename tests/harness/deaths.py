"""Forked processes that die by SIGKILL at their n-th change of the file system: what is left must be complete
or invisible."""

import os
import signal
import sys
import traceback

import torch

CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "shutil.rmtree",
    "os.truncate",
    "os.link",
}


def die_at_change(n: int) -> None:
    """SIGKILL this process just before its n-th change of the file system."""
    left = [n]

    def count(event: str, arguments: tuple) -> None:
        opens_to_write = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event in CHANGES or opens_to_write:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def forked(action) -> int:
    process = os.fork()
    if process == 0:
        failed = 1
        try:
            torch.set_num_threads(
                1
            )  # OpenMP's other threads do not exist in a forked process
            action()
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(failed)  # never on into the caller's tests
    return process


def survived(process: int) -> bool:
    """Whether the process came to its end; if not, it was killed."""
    status = os.waitpid(process, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), "the process failed, as it says above"
    return status == 0


def die_in_call(owner: object, name: str, n: int = 1) -> None:
    """SIGKILL this process when `owner.name` is called for the n-th time."""
    real = getattr(owner, name)
    left = [n]

    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, counted)
