"""Start and end of a command: its flags, its exit code, and its errors: one paragraph on stderr, without a
traceback.

`main_guard` runs a command; `run_command` also imports it, and handles stop signals from the first import to
the exit. Rank 0 prints an error that all ranks raise; the others wait before they exit (Note: the order of
exits). `Arguments` reads the flags of a tool.

Signals that request a stop are SIGTERM, SIGUSR1 and the first Ctrl-C (`StopRequest`). A second Ctrl-C ends
the command at once.

    start-up, one rank         raises `Stopped` at once: nothing is unsaved and no other rank waits
    start-up, several ranks    is recorded; ranks agree on it at the next step of the start-up
    training and evaluation    is recorded; ranks agree on it in the all-reduce of each step, so all of them
                               stop after the same step. A signal to one rank is enough
    after the last save        is ignored: the exit code must not report a failure
"""

import argparse
import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .console import is_name_too_long, paragraph, printable
from .errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DeviceMemoryError,
    LayoutError,
    MeetingError,
    MegatronDSError,
    MismatchError,
    ScheduleError,
    StorageError,
)
from .features import FLAG, import_features
from .launch_env import ends_siblings, is_launched, local_rank_in, rank_in, size_in
from .registry import did_you_mean

# All ranks raise these errors, because they follow from the same flags.
EVERYWHERE = (ConfigError, LayoutError, ScheduleError)
# A restart may succeed after these errors. Other errors of this package would come again.
PASSING = (CheckpointError, CommunicationError, DeviceMemoryError, StorageError)
LASTING = (MeetingError, MismatchError)  # but not after these
WAIT_SECONDS = 5.0

# Note: the order of exits.  torchrun, mpirun and srun -K end all ranks as soon as one of them fails. If rank
# 1 failed before rank 0 had printed the error, rank 0 would be killed and the error would not be printed.
# Therefore the other ranks wait: once rank 0 has printed the error and failed, the launcher ends them. A rank
# that still runs after the wait has an error that rank 0 does not have (a machine without the --config file,
# or with fewer GPUs), and prints it itself.


def run_command(module: str, function: str, **arguments: Any) -> NoReturn:
    """Import `module`, and exit with the code of its `function(**arguments)`. The last line of an entry
    script.

    Stop signals are handled while the module is imported, which takes seconds, and ignored once the exit code
    is known.
    """
    stop = StopRequest()
    # If one rank exited alone, the others would wait for it.
    if size_in(os.environ) > 1:
        stop.defer()
    stop.install()
    code = main_guard(lambda: getattr(import_module(module), function)(**arguments))
    ignore_stop_signals()
    if code and size_in(os.environ) > 1:
        _end_process(code)
    sys.exit(code)


def _end_process(code: int) -> NoReturn:
    """End as the interpreter does, but do not free its objects: after an error torch's store may abort the process
    meanwhile, with another exit code."""
    # It ends the threads of pools, which the exit functions would wait for.
    threading._shutdown()  # type: ignore[attr-defined]  # typeshed declares no private function
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of the file that a command writes in the block. Raises ConfigError where it cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}. Choose another --output."
        ) from error


def main_guard(main: Callable[[], int | None], rank: int | None = None) -> int:
    """Run `main`, print its error, and return the exit code. `sys.exit(main_guard(main))` is the last line of
    a tool.

    Rank 0 prints an error that all ranks raise: an error of the configuration, or one whose attribute
    `on_all_ranks` is true. Any other error is printed, with the rank, by each rank that raises it. An
    exception that is not a MegatronDSError keeps its traceback, which torchrun's summary quotes for the rank
    that failed first. rank: by default that of the launcher's environment
    """
    rank = rank_in(os.environ) if rank is None else rank
    # Errors of this package and of its absent libraries have a message alone.
    try:
        return main() or 0
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        print(
            f"error: {error.name} is not installed in this Python ({sys.executable}). Activate the "
            "environment that this package was installed in, such as: source "
            ".venv/bin/activate",
            file=sys.stderr,
        )
        return 2
    except MegatronDSError as error:
        # An error that all ranks share is printed once, by rank 0.
        sys.stdout.flush()
        shared = isinstance(error, EVERYWHERE) or getattr(error, "on_all_ranks", False)
        if rank == 0 or not shared or _must_print(os.environ):
            text = f"error{f' on rank {rank}' if rank > 0 else ''}: {_shown(error)}"
            print(text, file=sys.stderr, flush=True)
            is_lasting = isinstance(error, LASTING)
            is_caused = isinstance(error, CommunicationError) and not is_lasting
            is_passing = isinstance(error, PASSING) and not is_lasting
            note_for_torchrun(os.environ, text, is_caused, is_passing)
        return 2
    # A stop on request, and errors of the system.
    except Stopped as stop:
        if rank == 0:
            print(stop, flush=True)
        return 0
    except KeyboardInterrupt:
        return 130  # a shell's code for a command ended by Ctrl-C
    except OSError as error:
        if not is_name_too_long(error):
            note_for_torchrun(os.environ, traceback.format_exc())
            raise
        print(
            f"error: {paragraph(str(error))}: a path is longer than the file system allows, which is 255 "
            "bytes for a name and 4,095 for the whole. Give a shorter one.",
            file=sys.stderr,
            flush=True,
        )
        return 2
    except Exception:
        note_for_torchrun(os.environ, traceback.format_exc())
        raise


def _shown(error: MegatronDSError) -> str:
    """Return the message as one paragraph, so that a path in it cannot add lines; other programs' may have
    several.
    """
    is_foreign = isinstance(error, CommunicationError | DeviceMemoryError)
    return printable(str(error)) if is_foreign else paragraph(str(error))


def note_for_torchrun(
    env: Mapping[str, str],
    text: str,
    is_consequence: bool = False,
    is_passing: bool = True,
) -> None:
    """Write the error that torchrun's summary shows for this rank. is_passing: a restart may succeed, which
    `megatron-ds launch` reads.

    The summary takes the earliest failure for the cause. Other ranks fail within the same second because a peer is
    gone, and torchrun dates a killed rank by the time at which it noticed; therefore consequences get a later
    time.
    """
    path = env.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {
        "py_callstack": text,
        "timestamp": str(int(time.time() + WAIT_SECONDS * is_consequence)),
        "is_passing": is_passing,
    }
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    except OSError:
        pass  # the error is already on stderr


def _must_print(env: Mapping[str, str]) -> bool:
    """Return whether this rank prints an error of all ranks, because rank 0 has not failed after a wait."""
    if not rank_in(env):
        return False  # without a launcher, the caller has set the rank
    if not is_launched(env):
        return local_rank_in(env) == 0
    # in turns, so that the launcher ends the others after one message; its signal ends the wait
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(WAIT_SECONDS + 0.5 * local_rank_in(env))
    return ends_siblings(env) or local_rank_in(env) == 0


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that raises one ConfigError for all unknown flags. Call `parse_args` inside
    `main_guard`.

    Plain argparse prints a page of usage, accepts abbreviated flags, and reports a misspelt required flag
    only as missing.
    """

    def __init__(self, description: str | None):
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument(
            FLAG,
            action="append",
            metavar="MODULE",
            help="a module with features of another package; those of installed distributions are found without it",
        )

    def add_table(
        self, options: Mapping[str, Mapping[str, Any]], title: str | None = None
    ) -> None:
        """Add options: flag → arguments of `add_argument`. title: of their group in --help."""
        group = self.add_argument_group(title) if title else self
        for flag, arguments in options.items():
            group.add_argument(flag, **arguments)

    @property
    def flags(self) -> list[str]:
        """All flags."""
        return list(self._option_string_actions)

    def parse_args(  # type: ignore[override]  # typeshed's overload for other namespaces is not needed
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> argparse.Namespace:
        """Parse like argparse, but raise ConfigError with suggestions for unknown flags."""
        args = sys.argv[1:] if args is None else list(args)
        known = self.flags
        typed = [
            word.partition("=")[0]
            for word in args
            if word.startswith("--") and len(word) > 2
        ]
        unknown = [flag for flag in typed if flag not in known]
        wrong = [
            f"unknown flag {flag}{did_you_mean(flag, known) or '.'}" for flag in unknown
        ]
        if wrong:
            raise ConfigError(f"{' '.join(wrong)} --help lists the flags.")
        return super().parse_args(args, namespace)

    def parse_known_args(  # type: ignore[override]  # as of parse_args
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse, and import the features that --import names. Raises ConfigError."""
        found, rest = super().parse_known_args(args, namespace)
        import_features(vars(found).pop("import", None) or ())
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise the message as a ConfigError."""
        raise ConfigError(
            f"{message.removeprefix('argument ')}. --help lists the flags."
        )


# --------------------------------------------------------------------------------------------------- signals
GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):
    """A signal requested a stop before training began.

    Derives from BaseException, as KeyboardInterrupt does, so that no `except Exception` handles it.
    """


class StopRequest:
    """Context manager that handles the three signals; works in the main thread only.

    received   name of the first signal that arrived, or None
    """

    def __init__(self):
        self.received: str | None = None
        self._is_deferred = False
        self._previous: dict = {}

    def install(self) -> None:
        """Handle the signals. A signal that an outer request has received counts for this one, too."""
        for number in GRACEFUL:
            self._previous[number] = outer = signal.signal(number, self._handle)
            self.received = self.received or getattr(
                getattr(outer, "__self__", None), "received", None
            )

    def __enter__(self) -> "StopRequest":
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From this call on, a signal only sets `received`; it does not raise."""
        self._is_deferred = True

    def request(self, what: str) -> None:
        """Stop the run as a signal does, for another reason; `what` follows "received" in messages."""
        self.received = self.received or what

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:  # the next Ctrl-C is not handled here
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._is_deferred:
            raise Stopped(before_training(self.received))


def before_training(signal_name: str) -> str:
    """Return the last line of a command that was stopped during start-up."""
    return f"stopped by {signal_name} before the first step: there is nothing to save"


def ignore_stop_signals() -> None:
    """Ignore the signals from now on: the exit code is known, and the interpreter takes a moment to exit."""
    for number in GRACEFUL:
        signal.signal(number, signal.SIG_IGN)
