"""How a command ends when something is wrong: one paragraph on stderr, exit code 2, no traceback.

`main_guard` runs a command; `run_command` also imports it and handles stop signals from the first import to
the exit. An error that all ranks raise alike is printed once, by rank 0; the other ranks wait before they
exit (Note: the order of exits).
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from .errors import CommunicationError, ConfigError, LayoutError, MegatronDSError, ScheduleError
from .launch_env import ends_siblings, is_launched, local_rank_in, rank_in, size_in
from .registry import did_you_mean
from .stop_request import Stopped, StopRequest, ignore_stop_signals

# they follow from the same flags, so every rank raises them
EVERYWHERE = (ConfigError, LayoutError, ScheduleError)
WAIT_SECONDS = 5.0

# Note: the order of exits.  torchrun, mpirun and srun -K end all ranks as soon as one of them fails. If rank
# 1 failed before rank 0 had printed the error, rank 0 would be killed and the error would never be seen. So
# the other ranks wait: once rank 0 has printed the error and failed, the launcher ends them. A rank that
# still runs after the wait has an error that rank 0 does not have (a machine without the --config file, or
# with fewer GPUs), and prints it itself.


def run_command(module: str, function: str, **arguments) -> NoReturn:
    """Import `module` and exit with the code of its `function(**arguments)`; the last line of an entry
    script.

    Stop signals (`stop_request.py`) are handled while the module is imported, which takes seconds, and
    ignored once the exit code is known.
    """
    stop = StopRequest()
    if size_in(os.environ) > 1:          # one rank that left alone would let the others wait for it
        stop.defer()
    stop.install()
    code = main_guard(lambda: getattr(import_module(module), function)(**arguments))
    ignore_stop_signals()
    sys.exit(code)


def main_guard(main: Callable[[], int | None], rank: int | None = None) -> int:
    """Run `main`; the exit code. `sys.exit(main_guard(main))` is the last line of a tool.

    An error that all ranks raise alike is printed by rank 0 alone: errors of the configuration, and any error
    whose attribute `on_all_ranks` is true. Any other error is printed by the rank that raised it, with its
    number. An exception that is not a MegatronDSError keeps its traceback, which torchrun's summary quotes
    for the rank that failed first. rank: by default the rank in the launcher's environment.
    """
    rank = rank_in(os.environ) if rank is None else rank
    try:
        return main() or 0
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        print(f"error: {error.name} is not installed in this Python ({sys.executable}). Activate the "
              "environment that this package was installed in, such as: source "
              ".venv/bin/activate", file=sys.stderr)
        return 2
    except MegatronDSError as error:
        sys.stdout.flush()
        shared = isinstance(error, EVERYWHERE) or getattr(error, "on_all_ranks", False)
        if rank == 0 or not shared or _must_print(os.environ):
            text = f"error{f' on rank {rank}' * (rank > 0)}: {error}"
            print(text, file=sys.stderr, flush=True)
            note_for_torchrun(os.environ, text, is_consequence=isinstance(error, CommunicationError))
        return 2
    except Stopped as stop:
        if rank == 0:
            print(stop, flush=True)
        return 0
    except KeyboardInterrupt:
        return 130                                           # a shell's code for a command ended by Ctrl-C
    except Exception:
        note_for_torchrun(os.environ, traceback.format_exc())
        raise


def note_for_torchrun(env: Mapping[str, str], text: str, is_consequence: bool = False) -> None:
    """Set what torchrun's summary shows for this rank, so that the summary ends with the error itself.

    The summary calls the earliest failure the cause. Ranks notice within the same second that a peer is gone,
    and torchrun dates a killed rank by when it noticed: so a consequence is dated later.
    """
    path = env.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time() + WAIT_SECONDS * is_consequence))}
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    except OSError:
        pass                                                 # the error itself is on stderr already


def _must_print(env: Mapping[str, str]) -> bool:
    """Whether this rank, not rank 0, prints an error that all ranks should have: rank 0 did not fail during
    the wait.
    """
    if not rank_in(env):
        return False  # the rank was given by the caller; no launcher is known
    if not is_launched(env):
        return local_rank_in(env) == 0
    time.sleep(WAIT_SECONDS + 0.5 * local_rank_in(env))  # in turns, so that the first to fail ends the others
    return ends_siblings(env) or local_rank_in(env) == 0


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser whose `parse_args` raises one ConfigError. Call it inside `main_guard`."""

    def __init__(self, description: str | None):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        args = sys.argv[1:] if args is None else list(args)
        known = list(self._option_string_actions)
        typed = [word.partition("=")[0] for word in args if word.startswith("--") and len(word) > 2]
        wrong = ["unknown flag "
                 f"{flag}{did_you_mean(flag, known) or '.'}" for flag in typed if flag not in known]
        if wrong:
            raise ConfigError(f"{' '.join(wrong)} --help lists the flags.")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> None:
        raise ConfigError(f"{message.removeprefix('argument ')}. --help lists the flags.")
