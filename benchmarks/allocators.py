"""Memory allocators of the contestants of a benchmark: the environment of their processes.

Ours configure the allocator of their process (`host/allocator.py`); peers have the same settings by variables
that the allocator reads at its start. A preloaded allocator serves all contestants alike.
"""

import os
import sysconfig
from ctypes.util import find_library
from pathlib import Path

# --malloc → the settings of peers.
OF_PEERS = {
    "default": {},
    "keep": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TOP_PAD_": str(64 << 20),
    },
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "-1"},
}
INSTALLED_BY = {
    "jemalloc": "apt-get install libjemalloc2",
    "mimalloc": "pip install cmeel-mimalloc",
}
FOLDERS = (
    Path(sysconfig.get_path("purelib"), "cmeel.prefix/lib"),
    Path("/usr/local/lib"),
    *sorted(Path("/usr/lib").glob("*-linux-gnu*")),
    Path("/usr/lib64"),
    Path("/usr/lib"),
)


def environment(malloc: str, is_ours: bool) -> dict[str, str]:
    """Variables for a process of a contestant. Raises SystemExit if the library is missing."""
    settings = {} if is_ours else OF_PEERS[malloc]
    if malloc not in INSTALLED_BY:
        return settings
    preloaded = filter(None, (library(malloc), os.environ.get("LD_PRELOAD")))
    return settings | {"LD_PRELOAD": ":".join(preloaded)}


def library(name: str) -> str:
    """The library of an allocator, in a folder of `FOLDERS` or of the loader. Raises SystemExit."""
    files = (
        file for folder in FOLDERS for file in sorted(folder.glob(f"lib{name}.so*"))
    )
    found = next(map(str, files), None) or find_library(name)
    if found is None:
        raise SystemExit(
            f"--malloc {name}: no lib{name}.so is installed, so it cannot be preloaded. "
            f"Install it by `{INSTALLED_BY[name]}`."
        )
    return found
