"""What of a command line of DeepSpeed's launcher has no effect: it is accepted as there, and a sentence says so."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .hostfile import Slots
from .variables import env_paths

NO_HOSTFILE = Path("")
"""`--hostfile ''` asks for this machine alone."""


def is_file(hostfile: Path) -> bool:
    """Whether there is a hostfile; it may be a pipe of the shell."""
    return os.path.exists(hostfile) and not os.path.isdir(hostfile)


def sentences(
    args: argparse.Namespace, slots: Slots, environ: Mapping[str, str]
) -> Iterator[str]:
    """What is ignored of a command line, and what is done instead. slots: those of the job"""
    where = "this machine" if len(slots) == 1 else f"{len(slots)} hosts"
    # Hosts and their slots.
    named = args.hostfile not in (None, NO_HOSTFILE)
    if named and not is_file(args.hostfile):
        yield f"there is no file --hostfile {args.hostfile}: the ranks are started on {where}"
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = args.num_gpus or args.include or args.exclude
    if visible and chosen:
        yield (
            f"CUDA_VISIBLE_DEVICES={visible} is ignored, since --num_gpus, --include or --exclude choose the slots; "
            "leave them out to use the visible devices"
        )
    if args.node_rank == 0 and not args.no_ssh and len(slots) > 1:
        yield f"--node_rank 0 is ignored without --no_ssh: this command starts the ranks of {where}"
    # Variables of the ranks.
    name = environ.get("DS_ENV_FILE", "")
    places = (Path.home(), Path.cwd())
    if name and not env_paths(name, *places):
        searched = " nor in ".join(map(str, places))
        yield f"there is no file DS_ENV_FILE={name}, neither in {searched}: no variables are read from it"
