"""The memory of this rank, for the log."""

import torch

# Tag of the most memory that this rank has held.
PEAK = "mem-max-allocated-bytes"


def memory_tags(device: torch.device) -> dict[str, float]:
    """Megatron's tags of the memory of this rank, in bytes; on a CPU only the largest resident size."""
    if device.type != "cuda":
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {PEAK: usage.ru_maxrss * 2**10}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        PEAK: stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank ever held: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return memory_tags(device)[PEAK] / 2**30
