"""`python -m megatron_ds COMMAND …`, and `torchrun … -m megatron_ds train …`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

HELP = {"-h", "--help", "help"}
CODE_OF_SIGPIPE = 141  # a shell's code for a command whose reader has ended


def start() -> NoReturn:
    """Run the command. Ctrl-C before it runs ends the process without a traceback of imports."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .commands import main

    signal.signal(signal.SIGINT, handler)
    if HELP.isdisjoint(sys.argv):
        main()
    _print_page(main)


def _print_page(print_page: Callable[[], object]) -> NoReturn:
    """Print a page of help. A reader such as `head` may close the pipe after the beginning."""
    try:
        try:
            print_page()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _end_without_reader()
    sys.exit(0)


def _end_without_reader() -> NoReturn:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    sys.exit(CODE_OF_SIGPIPE)


if __name__ == "__main__":
    start()
