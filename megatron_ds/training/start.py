"""`Start`: the checkpoint with which a run begins.

    --load D, D has a checkpoint       that run continues under its run id (with --finetune: a new run)
    --load D --save D, D has none      a new run: the same command starts and resumes
    --load D, D has none               an error: a misspelt folder must not start a run from scratch
    no --load                          a new run

A *run id* is random. A start from scratch creates it, and run.json of each checkpoint of the run has it.
"""

import os
import secrets
from dataclasses import dataclass

from ..launch_env import run_in


@dataclass(frozen=True)
class Start:
    """step, run: of the checkpoint to load, and its run.json; None and {} for a start from scratch.

    foreign: format of the checkpoint, if another program wrote it; step and run are then None and {}
    """

    step: int | None
    run: dict
    run_id: str
    foreign: str | None = None


def known_folder(folder: str | None) -> str:
    """Return the --save or --load folder of a caller that needs it, and has looked whether it is given."""
    assert folder is not None, "the caller has looked"
    return folder


def new_run_id() -> str:
    """Return the identifier that the launcher gave the run, or a random one."""
    return run_in(os.environ) or secrets.token_hex(4)
