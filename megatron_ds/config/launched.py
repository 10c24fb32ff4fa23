"""The launcher's word on this process's rank, for what is said before any group exists."""

from collections.abc import Mapping


def rank_in(env: Mapping[str, str]) -> int:
    """By the environment of torchrun, Slurm or Open MPI; 0 without a launcher."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if env.get(name, "").isdigit():
            return int(env[name])
    return 0
