"""The launcher's word on this process, for what is said before any group exists."""

from collections.abc import Mapping

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def rank_in(env: Mapping[str, str]) -> int:
    """By the environment of torchrun, Slurm or Open MPI; 0 without a launcher."""
    return _first_number(env, RANKS) or 0


def local_rank_in(env: Mapping[str, str]) -> int:
    """The place on this machine; 0 where nobody says."""
    return _first_number(env, LOCAL_RANKS) or 0


def is_launched(env: Mapping[str, str]) -> bool:
    """There is a launcher, and not just its variables: it may end all ranks when one of them fails."""
    return any(env.get(name) for name in LAUNCHERS)


def ends_siblings(env: Mapping[str, str]) -> bool:
    """The launcher surely does so. srun must be told (-K), and torchrun's workers may see srun's variables."""
    return bool(env.get("TORCHELASTIC_RUN_ID") or env.get("OMPI_COMM_WORLD_RANK"))


def _first_number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)
