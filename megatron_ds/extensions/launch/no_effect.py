"""What has no effect of a command line of DeepSpeed's launcher: it is accepted, and named in a sentence."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import devices
from .hostfile import Slots
from .variables import env_paths

NO_HOSTFILE = Path("")
"""`--hostfile ''` asks for this machine alone."""


def is_file(hostfile: Path) -> bool:
    """Return whether there is a hostfile; it may be a pipe of the shell."""
    return os.path.exists(hostfile) and not os.path.isdir(hostfile)


def sentences(
    args: argparse.Namespace, slots: Slots, environ: Mapping[str, str]
) -> Iterator[str]:
    """Return which words of a command line are ignored, and what is done instead. slots: those of the job"""
    is_one = len(slots) == 1
    where = "this machine" if is_one else f"{len(slots)} hosts"
    # Several flags choose hosts and devices, and some exclude others.
    hostfile = args.hostfile
    is_named = hostfile not in (None, NO_HOSTFILE)
    if is_named and not is_file(hostfile):
        yield f"there is no file --hostfile {hostfile}: the ranks are started on {where}"
    visible = environ.get(devices.VISIBLE)
    is_chosen = args.include or args.exclude
    if visible and is_chosen and not devices.is_allocated(environ):
        yield (
            f"{devices.VISIBLE}={visible} is ignored, since --include and --exclude name devices by their numbers; "
            "leave them out, or give --num_gpus, to use the visible devices"
        )
    is_first = args.node_rank == 0
    if is_first and not args.no_ssh and not is_one:
        yield f"--node_rank 0 is ignored without --no_ssh: this command starts the ranks of {where}"
    # A file of variables that is missing would go unnoticed.
    name = environ.get("DS_ENV_FILE")
    home = Path.home()
    folder = Path.cwd()
    if name and not env_paths(name, home, folder):
        yield (
            f"there is no file DS_ENV_FILE={name}, neither in {home} nor in {folder}: no variables are read from it"
        )
