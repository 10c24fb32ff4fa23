"""`main_guard`: how a command ends when something is wrong: one paragraph on stderr, exit code 2, no traceback."""

import os
import sys
from collections.abc import Callable

from ..errors import ConfigError, LayoutError, MegatronDSError, ScheduleError
from .launched import rank_in

EVERYWHERE = (ConfigError, LayoutError, ScheduleError)       # they follow from the same words, so every rank raises them


def main_guard(main: Callable[[], int | None], rank: int | None = None) -> int:
    """Run `main`; the exit code. `sys.exit(main_guard(main))` is the last line of a command.

    An error that all ranks raise alike is told by rank 0 alone: those of the configuration, and any with a true attribute
    `on_all_ranks`, which whoever made the ranks agree on it sets. Another error is told by the rank that has it, with its
    number, because nobody else knows. rank: by default the launcher's environment says it.
    Errors that nobody raised on purpose keep their traceback.
    """
    rank = rank_in(os.environ) if rank is None else rank
    try:
        return main() or 0
    except MegatronDSError as error:
        sys.stdout.flush()
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif not isinstance(error, EVERYWHERE) and not getattr(error, "on_all_ranks", False):
            print(f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130                                           # what a shell expects of a command ended by Ctrl-C
