"""Whether a node has the program of its ranks: asked by its agent, before any rank starts.

A script may be on other hosts than the launcher's, so the launcher itself does not look for it.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from .job import RankProgram


def reason_against(
    program: RankProgram, folder: Path, variables: Mapping[str, str]
) -> str:
    """Return why no rank of this node can start its program; "" if they can. variables: of the ranks"""
    first = program.words[0]
    place = folder / first
    if not program.python:
        # Names without a slash are found by PATH.
        name = str(place) if "/" in first else first
        if shutil.which(name, path=variables.get("PATH", os.defpath)):
            return ""
        kind = "exists, but cannot be executed" if place.exists() else "does not exist"
        return (
            f"the program {first} {kind}. With --no_python it is a command of PATH, or an executable file with a "
            f"path from {folder}, such as ./{Path(first).name} (chmod +x). A script of Python needs no --no_python"
        )
    if program.is_module:
        if program.python != sys.executable or _has_module(first, folder, variables):
            return ""
        return (
            f"Python finds no module {first.partition('.')[0]}, neither in {folder} nor on its path. Install it, set "
            "PYTHONPATH, or leave out --module for the path of a script"
        )
    if place.exists():
        return ""
    return (
        f"the script {place} does not exist. Paths of scripts are relative to the folder in which the launcher was "
        "started, and the same on every host. --module starts a module, and --no_python a command"
    )


def _has_module(name: str, folder: Path, variables: Mapping[str, str]) -> bool:
    """Return whether this interpreter finds the package of a module. Nothing is imported."""
    top = name.partition(".")[0]
    added = variables.get("PYTHONPATH", "").split(os.pathsep)
    if PathFinder.find_spec(top, [str(folder), *filter(None, added)]):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # a module without a spec, such as __main__, is there
        return True
