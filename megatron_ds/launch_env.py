"""The launcher's environment: rank and world size of this process before there is a process group."""

import platform
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Variables(NamedTuple):
    """Names of a launcher's variables; the first one that is set counts.

    job     identifies the job, equal on all ranks
    hosts   number of hosts, for launchers that do not give the number of ranks of a host
    option  how a user gives all ranks a variable
    """

    launcher: str
    rank: str
    sizes: tuple[str, ...]
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    hosts: str = ""
    option: str = ""

    def are_in(self, env: Mapping[str, str]) -> bool:
        """Return whether the launcher started this process."""
        return bool(env.get(self.rank)) and any(env.get(name) for name in self.sizes)


TORCHRUN = Variables(
    "torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)
)
SLURM = Variables(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
)
MPI = (
    Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        option="mpirun with -x MASTER_ADDR=",
    ),
    Variables(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        option="mpirun_rsh with MASTER_ADDR=",
    ),
    Variables(
        "MVAPICH",
        "MVP_COMM_WORLD_RANK",
        ("MVP_COMM_WORLD_SIZE",),
        ("MVP_COMM_WORLD_LOCAL_RANK",),
        ("MVP_COMM_WORLD_LOCAL_SIZE",),
        option="mpirun_rsh with MASTER_ADDR=",
    ),
    Variables(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        ("LSB_JOBID",),
        option="jsrun with -E MASTER_ADDR=",
    ),
    Variables(
        "Flux",
        "FLUX_TASK_RANK",
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
        (),
        ("FLUX_JOB_ID",),
        hosts="FLUX_JOB_NNODES",
        option="flux run with --env=MASTER_ADDR=",
    ),
    Variables(
        "PALS",
        "PALS_RANKID",
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        ("PALS_APID",),
        option="mpiexec with --env MASTER_ADDR=",
    ),
    # Hydra, the launcher of MPICH, Intel MPI and others.
    Variables(
        "MPI",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID", "PBS_JOBID", "LSB_JOBID"),
        option="mpiexec with -genv MASTER_ADDR ",
    ),
)
# Variables of the rank, of launchers that do not set the number of ranks.
LONE_RANKS = {"ALPS_APP_PE": "aprun", "PMIX_RANK": "a launcher with PMIx"}
FAMILIES = (TORCHRUN, SLURM, *MPI)
RANKS = tuple(family.rank for family in FAMILIES)
SIZES = tuple(dict.fromkeys(name for family in FAMILIES for name in family.sizes))
LOCAL_RANKS = tuple(
    dict.fromkeys(name for family in FAMILIES for name in family.local_ranks)
)
OWN_LAUNCHER = "MEGATRON_DS_LAUNCH"
RESTARTS = "MEGATRON_DS_RESTARTS"
RUN = "MEGATRON_DS_RUN"
ENDING_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID",
    OWN_LAUNCHER,
    *(family.rank for family in MPI),
)
LAUNCHERS = (*ENDING_LAUNCHERS, SLURM.rank)
FIRST_PORT = 20_000
NUM_PORTS = 12_000  # ports below those of outgoing connections


def variables_in(env: Mapping[str, str]) -> Variables | None:
    """Return the variables of the launcher that started this process; None without one.

    Within a job of Slurm, mpirun starts its daemons by srun, whose numbers the ranks inherit.
    """
    found = [family for family in FAMILIES if family.are_in(env)]
    if len(found) > 1 and found[0] is SLURM:
        of_step = (_first_number(env, (SLURM.rank,)), _first_number(env, SLURM.sizes))
        mpi = found[1]
        of_mpi = (_first_number(env, (mpi.rank,)), _first_number(env, mpi.sizes))
        return SLURM if of_step == of_mpi else mpi
    return found[0] if found else None


def rank_in(env: Mapping[str, str]) -> int:
    """Return the rank that a launcher has set; 0 without one."""
    found = variables_in(env)
    return _first_number(env, (found.rank,) if found else RANKS) or 0


def size_in(env: Mapping[str, str]) -> int:
    """Return the world size that a launcher has set; 1 without one."""
    found = variables_in(env)
    return _first_number(env, found.sizes if found else SIZES) or 1


def local_rank_in(env: Mapping[str, str]) -> int:
    """Return the rank on this machine; 0 if the environment has none."""
    found = variables_in(env)
    own = found.local_ranks if found else ()
    return _first_number(env, (*own, *LOCAL_RANKS)) or 0


def port_of_job(job: str, default: int) -> int:
    """Return a port that follows from the identifier of a job: the same for all its ranks, and usually another for
    other jobs.

    default: where there is no identifier
    """
    if not job.strip("."):
        return default
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def unresolved(address: str) -> str:
    """Return the reason why this host cannot resolve an address of rank 0; "" if it can."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or error
        return f"{platform.node()} cannot resolve {address}, the address of rank 0 ({text})"
    return ""


def restarts_in(env: Mapping[str, str]) -> int:
    """Return how often `megatron-ds launch` has started this job again; 0 at its first start."""
    return _first_number(env, (RESTARTS,)) or 0


def run_in(env: Mapping[str, str]) -> str:
    """Return the identifier that the launcher gives a new run, the same after restarts; "" without one."""
    return env.get(RUN, "")


def is_launched(env: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process. It may end all ranks when one of them fails."""
    return any(env.get(name) for name in LAUNCHERS)


def ends_siblings(env: Mapping[str, str]) -> bool:
    """Return whether the launcher ends all ranks when one fails. srun does so only with -K."""
    return any(env.get(name) for name in ENDING_LAUNCHERS)


# torch.distributed.launch and DeepSpeed's launcher append --local-rank N, and also set LOCAL_RANK.
def with_local_rank(
    env: Mapping[str, str], local_rank: int | None
) -> Mapping[str, str]:
    """Return the environment with --local-rank as LOCAL_RANK, if a launcher set RANK and WORLD_SIZE only."""
    if (
        local_rank is None
        or local_rank < 0
        or any(env.get(name) for name in LOCAL_RANKS)
    ):
        return env
    return (
        {**env, "LOCAL_RANK": str(local_rank)}
        if env.get("RANK") and env.get("WORLD_SIZE")
        else env
    )


def local_rank_contradiction(
    env: Mapping[str, str], local_rank: int | None
) -> str | None:
    """Return how the environment contradicts --local-rank; a negative number means that none was given."""
    name = _local_rank_name(env)
    if (
        local_rank is None
        or local_rank < 0
        or name is None
        or int(env[name]) == local_rank
    ):
        return None
    return (
        f"--local-rank {local_rank}, but {name} is {env[name]} in the environment: they number the same "
        "process. Remove the flag; the launcher's variable is enough."
    )


def problems_of_local_rank(
    env: Mapping[str, str], local_rank: int | None
) -> Sequence[str]:
    """Return the problems of --local-rank in this environment. A negative number means that none was given."""
    if problem := local_rank_contradiction(env, local_rank):
        return (problem,)
    is_alone = not is_launched(env) and not (env.get("RANK") and env.get("WORLD_SIZE"))
    if (
        _local_rank_name(env) is None
        and local_rank is not None
        and local_rank > 0
        and is_alone
    ):
        return (
            f"--local-rank {local_rank} without RANK and WORLD_SIZE in the environment: this process "
            "cannot find the others. Start with torchrun, or remove the flag to run a single process.",
        )
    return ()


def _local_rank_name(env: Mapping[str, str]) -> str | None:
    return next((name for name in LOCAL_RANKS if env.get(name, "").isdigit()), None)


def _first_number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)
