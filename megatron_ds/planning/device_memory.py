"""How much memory is free on this rank's device: of the GPU, or of the machine as far as this process may use it."""

import re
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes; on a CPU those that all ranks of the machine share. 0 where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    told = [number for number in (_machine(Path("/proc/meminfo")), _cgroup(CGROUP)) if number is not None]
    return min(told, default=0)


def _machine(meminfo: Path) -> int | None:
    """What Linux believes can be had without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _cgroup(folder: Path) -> int | None:
    """What is left of a container's limit (version 2; version 1 keeps the same numbers under other names)."""
    for limit, used, stat in (("memory.max", "memory.current", "memory.stat"),
                              ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")):
        numbers = [_text(folder / name).strip() for name in (limit, used)]
        if all(number.isdigit() for number in numbers):
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / stat), re.MULTILINE)
            return max(int(numbers[0]) - int(numbers[1]) + (int(cache[1]) if cache else 0), 0)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
