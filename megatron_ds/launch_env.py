"""The launcher's environment: rank and world size of this process before there is a process group."""

from collections.abc import Mapping, Sequence

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
OWN_LAUNCHER = "MEGATRON_DS_LAUNCH"
RESTARTS = "MEGATRON_DS_RESTARTS"
RUN = "MEGATRON_DS_RUN"
LAUNCHERS = (
    "TORCHELASTIC_RUN_ID",
    OWN_LAUNCHER,
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
)
ENDING_LAUNCHERS = ("TORCHELASTIC_RUN_ID", OWN_LAUNCHER, "OMPI_COMM_WORLD_RANK")


def rank_in(env: Mapping[str, str]) -> int:
    """The rank that torchrun, Slurm or Open MPI has set; 0 without a launcher."""
    return _first_number(env, RANKS) or 0


def size_in(env: Mapping[str, str]) -> int:
    """The world size that torchrun, Slurm or Open MPI has set; 1 without a launcher."""
    return _first_number(env, SIZES) or 1


def local_rank_in(env: Mapping[str, str]) -> int:
    """The rank on this machine; 0 if the environment has none."""
    return _first_number(env, LOCAL_RANKS) or 0


def restarts_in(env: Mapping[str, str]) -> int:
    """How often `megatron-ds launch` has started this job again; 0 at its first start."""
    return _first_number(env, (RESTARTS,)) or 0


def run_in(env: Mapping[str, str]) -> str:
    """The identifier that the launcher gives a run that begins, the same after restarts; "" without one."""
    return env.get(RUN, "")


def is_launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher started this process. It may end all ranks when one of them fails."""
    return any(env.get(name) for name in LAUNCHERS)


def ends_siblings(env: Mapping[str, str]) -> bool:
    """Whether the launcher ends all ranks when one fails. srun does so only with -K."""
    return any(env.get(name) for name in ENDING_LAUNCHERS)


# torch.distributed.launch and DeepSpeed's launcher append --local-rank N, and also set LOCAL_RANK.
def with_local_rank(
    env: Mapping[str, str], local_rank: int | None
) -> Mapping[str, str]:
    """The environment with --local-rank as LOCAL_RANK, if a launcher set RANK and WORLD_SIZE only."""
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
    """What contradicts --local-rank in the environment. A negative number means that none was given."""
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
    """What is wrong with --local-rank in this environment. A negative number means that none was given."""
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
