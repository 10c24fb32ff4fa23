"""NCCL's flight recorder: torch keeps the last collectives of a rank, and they become a file when a rank is stuck.

The watchdog writes the file when it ends a process. This package ends earlier, with an error that names the stuck
rank, so it writes the file itself. `torchfrtrace`, a program of torch, compares the files of all ranks.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

# Names of a variable, the newest first → its value unless one of them is set.
DEFAULTS = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): os.path.join(
        "~", ".cache", "torch", "comm_lib_trace_rank_"
    ),
}
FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def switch_on(env: MutableMapping[str, str]) -> None:
    """Record collectives, unless the variables are set to something else. Before the first group of NCCL is made."""
    for names, value in DEFAULTS.items():
        if not any(name in env for name in names):
            env[names[0]] = os.path.expanduser(value)


def save_record(rank: int) -> str:
    """Write the record of this rank and return a sentence that names the file; "" where there is no record.

    rank: global
    """
    read = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    prefix = next((os.environ[name] for name in FILE_NAMES if name in os.environ), "")
    if read is None or not prefix:
        return ""
    path = Path(f"{prefix}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(read())
    return f"The last collectives of this rank are in {path}; torchfrtrace compares the files of all ranks"
