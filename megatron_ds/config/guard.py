"""`main_guard`: how a command ends when something is wrong: one paragraph on stderr, exit code 2, no traceback.

Of an error that all ranks have alike, rank 0 tells, once. The others keep quiet and wait a while (Note: the last word).
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping

from ..errors import CommunicationError, ConfigError, LayoutError, MegatronDSError, ScheduleError
from .launched import ends_siblings, is_launched, local_rank_in, rank_in

EVERYWHERE = (ConfigError, LayoutError, ScheduleError)       # they follow from the same words, so every rank raises them
WAIT_SECONDS = 5.0

# Note: the last word.  torchrun, mpirun and srun -K end all ranks as soon as one of them fails. Were rank 1 the quicker to
# fail, rank 0 would be gone before it told why, and nobody would. So the others wait: when rank 0 has told and failed, the
# launcher ends them. A rank that is still there after the wait has an error that rank 0 does not have (a machine without
# the --config file, or with fewer GPUs), and tells it itself.


def main_guard(main: Callable[[], int | None], rank: int | None = None) -> int:
    """Run `main`; the exit code. `sys.exit(main_guard(main))` is the last line of a command.

    An error that all ranks raise alike is told by rank 0 alone: those of the configuration, and any with a true attribute
    `on_all_ranks`, which whoever made the ranks agree on it sets. Another error is told by the rank that has it, with its
    number, because nobody else knows. rank: by default the launcher's environment says it.
    Errors that nobody raised on purpose keep their traceback; torchrun's summary quotes it for the rank that failed first.
    """
    rank = rank_in(os.environ) if rank is None else rank
    try:
        return main() or 0
    except MegatronDSError as error:
        sys.stdout.flush()
        shared = isinstance(error, EVERYWHERE) or getattr(error, "on_all_ranks", False)
        if rank == 0 or not shared or _is_mine_alone(os.environ):
            begin = f"error{f' on rank {rank}' * (rank > 0)}:"
            print(begin, error, file=sys.stderr, flush=True)
            note_for_torchrun(os.environ, f"told above, in the line that begins with {begin}",
                              is_consequence=isinstance(error, CommunicationError))
        return 2
    except KeyboardInterrupt:
        return 130                                           # what a shell expects of a command ended by Ctrl-C
    except Exception:
        note_for_torchrun(os.environ, traceback.format_exc())
        raise


def note_for_torchrun(env: Mapping[str, str], text: str, is_consequence: bool = False) -> None:
    """What torchrun's summary says of this rank, instead of advice on how to get a traceback.

    The summary calls the earliest failure the cause. That a peer is gone is told within the second in which it went, and
    torchrun dates a killed rank by when it noticed: so a consequence is dated later.
    """
    path = env.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time() + WAIT_SECONDS * is_consequence))}
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    except OSError:
        pass                                                 # the error itself has been told


def _is_mine_alone(env: Mapping[str, str]) -> bool:
    """Whether an error that all ranks should have turns out, after a wait, to be one that rank 0 does not tell."""
    if not rank_in(env):
        return False                                         # the caller's rank, which no launcher knows of
    if not is_launched(env):
        return local_rank_in(env) == 0
    time.sleep(WAIT_SECONDS + 0.5 * local_rank_in(env))      # one after the other, so that the first ends the rest
    return ends_siblings(env) or local_rank_in(env) == 0
