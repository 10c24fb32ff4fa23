"""`Launch`: rank, world size and address from the launcher's environment; starts and stops torch.distributed.

Supported launchers: torchrun (and others that set its variables), Slurm's srun, the launchers of MPI, Flux, or none,
which is one rank (`launch_env`). Training scripts of one rank open no socket and make no process group; programs
around an engine get one, since they may call torch.distributed themselves.
"""

import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..console import one_line, shortened
from ..errors import CommunicationError, ConfigError, MegatronDSError
from ..host import places
from ..host.backend_log import only_errors
from ..host.file_limit import check_file_limit
from ..launch_env import (
    LONE_RANKS,
    MPI,
    SLURM,
    TORCHRUN,
    Variables,
    port_of_job,
    variables_in,
)
from .control import control_group, forget
from .flight_recorder import switch_on
from .group import ACTIVATION_AXES, NUM_STREAMS, Transport
from .nccl_settings import USUAL, NcclSettings
from .rendezvous import Place, meet, report_absence
from .stuck_ranks import current_call, name_stuck_ranks, register_host

if TYPE_CHECKING:
    from .transport import TorchTransport

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=10)
MOST_CHARACTERS = 500  # of an error in the message of other ranks
logger = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """Global rank, rank on this host, numbers of ranks, address of rank 0, and the launcher's name.

    file: where ranks meet instead of the address, "" if they meet there
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    source: str = "none"
    file: str = ""


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that `env` (default: os.environ) describes. ConfigError names a wrong variable."""
    return _checked(_launch_in(os.environ if env is None else env))


@contextmanager
def reported_to_others(launch: Launch | None = None) -> Iterator[None]:
    """Inside, before this rank meets the others, an error is also reported to them, so that they end, too.

    launch: by default that of os.environ
    """
    try:
        yield
    except Exception as error:
        with suppress(ConfigError):  # without an address there is no place for a report
            launch = launch or _launch_in(os.environ)
            if launch.world_size > 1:
                report_absence(_place(launch), _in_one_line(error))
        raise


def _place(launch: Launch) -> Place:
    address = (launch.address, launch.port)
    return Place(address, launch.rank, launch.world_size, launch.file)


def _in_one_line(error: Exception) -> str:
    """Return the text of an error, which begins with its class if the error is not of this package."""
    is_ours = isinstance(error, MegatronDSError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return shortened(one_line(" ".join(text.split())), MOST_CHARACTERS)


def _launch_in(env: Mapping[str, str]) -> Launch:
    found = variables_in(env)
    if found is None:
        _check_alone(env)
        return Launch()
    if found is TORCHRUN:
        return _torchrun(env)
    return _slurm(env) if found is SLURM else _mpi(env, found)


def _check_alone(env: Mapping[str, str]) -> None:
    """Raises ConfigError if half of a launcher's variables show that this process is one of several."""
    if env.get(TORCHRUN.rank):
        raise ConfigError(
            "RANK is set but WORLD_SIZE is not: a launcher sets both. Start with torchrun, or "
            "unset RANK."
        )
    # A number of ranks, and no rank. In a shell of Slurm or Flux that is the size of the allocation.
    for family in (TORCHRUN, *MPI):
        name = family.sizes[0]
        if env.get(name) and family.launcher != "Flux" and _int(env, name) > 1:
            raise ConfigError(
                f"{name}={env[name]} is set but {family.rank} is not: each of {env[name]} processes would train alone, "
                f"as rank 0 of 1. Start them with a launcher, which sets both, or unset {name}."
            )
    for name, launcher in LONE_RANKS.items():
        if env.get(name) and _int(env, name) > 0:
            raise ConfigError(
                f"{launcher} started this process as number {env[name]} ({name}), and does not set how many there "
                "are. Set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in each process, or start with torchrun."
            )


def start(
    launch: Launch, timeout: timedelta = DEFAULT_TIMEOUT, alone: bool = False
) -> torch.device:
    """Start torch.distributed unless there is one rank; returns the device of this rank. Collective.

    alone: start it for one rank, too

    Where there are GPUs, its groups have NCCL alone, else gloo. Raises CommunicationError when other ranks do not
    connect in time, have another world size, or ended by an error.
    """
    with reported_to_others(launch):
        places.open_places(os.environ, launch.rank)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = _own_device(launch)
            torch.cuda.set_device(device)
            switch_on(os.environ)
        if launch.world_size > 1:
            check_file_limit(launch.world_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.world_size > 1:
        _join(launch, backend, timeout)
    elif alone:
        _join_alone(backend, timeout)
    return device


def stop() -> None:
    """Stop torch.distributed; does nothing where it was not started."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        forget()
        dist.destroy_process_group()


def expand_nodelist(text: str) -> list[str]:
    """Return the hostnames of Slurm's list notation: "gpu[003-005,9],login" → gpu003 gpu004 gpu005 gpu9 login."""
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            pieces = (
                [literal]
                if literal
                else [n for part in ranges.split(",") for n in _numbers(part)]
            )
            expanded = [name + piece for name in expanded for piece in pieces]
        names += expanded
    return names


def _numbers(part: str) -> list[str]:
    first, _, last = part.strip().partition("-")
    width = len(first)
    return [str(i).zfill(width) for i in range(int(first), int(last or first) + 1)]


def _torchrun(env: Mapping[str, str]) -> Launch:
    # Several ranks need an address at which they meet.
    address = env.get("MASTER_ADDR", "")
    world_size = _int(env, "WORLD_SIZE")
    if not address and world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size} but MASTER_ADDR is not set: the ranks cannot find rank "
            "0. torchrun sets it; without torchrun, set it to the host of rank 0."
        )
    rank = _int(env, "RANK")
    # A rank's GPU cannot be guessed on several hosts.
    if not env.get("LOCAL_RANK") and world_size > 1 and address not in _LOCAL:
        raise ConfigError(
            "LOCAL_RANK is not set: it selects the GPU of a rank. torchrun sets it; without "
            "torchrun, set it to 0 in the first process of each machine, to 1 in the second, "
            "and so on."
        )
    # On one host, numbers on the host are those of the world.
    local_rank = _int(env, "LOCAL_RANK", rank)
    local_size = _int(
        env, "LOCAL_WORLD_SIZE", world_size if address in _LOCAL else local_rank + 1
    )
    return Launch(
        rank,
        world_size,
        local_rank,
        local_size,
        address or "127.0.0.1",
        _int(env, "MASTER_PORT", DEFAULT_PORT),
        "torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Launch:
    """Variables of the job *step* come first: `srun -n 2` in an allocation of eight tasks is two ranks."""
    # The numbers of this task.
    size = _int(
        env,
        "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS",
    )
    rank = _int(env, "SLURM_PROCID")
    local_rank = _int(env, "SLURM_LOCALID", 0)
    # In the batch script this rank would wait for the others for ever.
    if size > 1 and env.get("SLURM_TASK_PID") and not env.get("SLURM_STEP_ID"):
        raise ConfigError(
            f"this runs in the batch script of a Slurm job of {size} tasks, not as one of the "
            "tasks. Start the ranks with srun (srun python pretrain_gpt.py …) or torchrun; for "
            "one rank only, put SLURM_NTASKS=1 before the command."
        )
    # A terminal is that of the first task, a shell, which started this process.
    is_terminal = env.get("SLURM_PTY_PORT") and _is_below_shell(env)
    if size > 1 and is_terminal:
        raise ConfigError(
            f"this runs in a terminal of srun --pty with {size} tasks, of which the others run a shell and will not "
            f"come. Start the terminal with srun -n 1 --pty, and in it the ranks with srun or torchrun; for one rank "
            "only, put SLURM_STEP_NUM_TASKS=1 before the command."
        )
    # Rank 0 is on the first host of the list, unless the user names another.
    hosts = expand_nodelist(
        _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    )
    address = env.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if not address:
        raise ConfigError(
            f"Slurm started rank {rank} of {size}, but neither SLURM_NODELIST nor MASTER_ADDR "
            "gives the host of rank 0. Set MASTER_ADDR to it."
        )
    # A port that follows from the job, so that two jobs on one host differ.
    local_size = _tasks_on_node(env, _int(env, "SLURM_NODEID", 0)) or -(
        -size // max(1, len(hosts))
    )
    job = (
        _first(env, "SLURM_JOB_ID", "SLURM_JOBID") + "." + env.get("SLURM_STEP_ID", "")
    )
    port = _int(env, "MASTER_PORT", port_of_job(job, DEFAULT_PORT))
    return Launch(rank, size, local_rank, local_size, address, port, "Slurm")


def _is_below_shell(env: Mapping[str, str]) -> bool:
    """Return whether this process is no task of srun, but below one with a terminal, as far as /proc shows.

    Ranks that are started by srun within a terminal inherit its variables, and have no terminal.
    """
    task = env.get("SLURM_TASK_PID")
    pid = os.getpid()
    if task == str(pid):
        return False
    with suppress(OSError, ValueError):
        while pid > 1:
            stat = Path(f"/proc/{pid}/stat").read_text()
            _, parent, _, _, terminal, *_ = stat.rpartition(")")[2].split()
            if task == str(pid):
                return terminal != "0"
            pid = int(parent)
    return True


def _mpi(env: Mapping[str, str], of: Variables) -> Launch:
    """Return a rank of mpirun, mpiexec, jsrun or flux, which set numbers and no address."""
    rank = _int(env, of.rank)
    size = _int(env, _first_name(env, of.sizes))
    # How many of the ranks are here; 0 if it is not known.
    here = _first_name(env, of.local_sizes)
    local_size = _int(env, here) if here else 0
    if of.hosts and _int(env, of.hosts, 0) == 1 or size == 1:
        local_size = size
    # Rank 0 is on this host, or at MASTER_ADDR.
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        where = f" on several machines, {local_size} of them here" if local_size else ""
        raise ConfigError(
            f"{of.launcher} started {size} ranks{where}, but MASTER_ADDR is not set: the host of rank 0 is unknown. "
            f"Run {of.option}<host of rank 0>."
        )
    is_local = local_size == size or address in _LOCAL
    local_name = _first_name(env, (*of.local_ranks, *TORCHRUN.local_ranks))
    if not local_name and not is_local:
        raise ConfigError(
            f"{of.launcher} started {size} ranks, and sets none of {', '.join(of.local_ranks)}, which select the GPU "
            "of a rank. Set LOCAL_RANK in each process: to 0 in the first one of a host, to 1 in the second, and so "
            "on."
        )
    local_rank = _int(env, local_name, rank) if local_name else rank
    local_size = local_size or (size if is_local else local_rank + 1)
    port = _int(env, "MASTER_PORT", port_of_job(_first(env, *of.job), DEFAULT_PORT))
    return Launch(rank, size, local_rank, local_size, address, port, of.launcher)


def _tasks_on_node(env: Mapping[str, str], node: int) -> int:
    """Tasks on a node: "4(x2),3" is two nodes with four, then one with three. 0 if unset."""
    counts = []
    text = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 0


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((env[name] for name in names if env.get(name)), "")


def _first_name(env: Mapping[str, str], names: Sequence[str]) -> str:
    return next((name for name in names if env.get(name)), "")


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not an integer; the launcher should set "
            "it."
        ) from None


def _checked(launch: Launch) -> Launch:
    if not (
        0 <= launch.rank < launch.world_size
        and 0 <= launch.local_rank < launch.local_world_size
    ):
        raise ConfigError(
            f"{launch.source} gives rank {launch.rank} of {launch.world_size}, local rank "
            f"{launch.local_rank} of {launch.local_world_size}: ranks are numbered from 0, so "
            "each is smaller than its world size."
        )
    return launch


def _own_device(launch: Launch) -> torch.device:
    """Return the GPU of this rank: the only visible one where the launcher binds one GPU to each task."""
    count = torch.cuda.device_count()
    # The numbers are the same on all ranks of a host.
    if count > 1 and max(launch.local_rank + 1, launch.local_world_size) > count:
        raise ConfigError(
            f"{launch.local_world_size} ranks were started on {platform.node()}, which shows "
            f"{count} GPUs: each rank needs its own. Start {count} ranks on it at most."
        )
    return torch.device("cuda", launch.local_rank if count > 1 else 0)


def _join(launch: Launch, backend: str, timeout: timedelta) -> None:
    begin = time.monotonic()
    try:
        with places.WAITING:
            meet(backend, _place(launch), timeout)
            register_host()
    except (RuntimeError, ValueError, OSError) as error:
        hint = (
            "srun, not plain python, starts the ranks of a Slurm job"
            if launch.source == "Slurm"
            else "start all of them, with the same address and port, and check whether one exited with an error"
        )
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} (from {launch.source}) could not connect to the "
            f"other ranks at {launch.file or f'{launch.address}:{launch.port}'} within "
            f"{time.monotonic() - begin:.0f} s: {hint}; "
            f"MASTER_PORT chooses another port if this one is taken. The cause: {error}"
        ) from error


def _join_alone(backend: str, timeout: timedelta) -> None:
    """A process group of one rank. Its store is in memory: no port is taken."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    except RuntimeError as error:  # the engine itself does without
        logger.warning(
            "torch.distributed cannot be started for this one process (%s): the program can "
            "train, but not call torch.distributed itself",
            error,
        )


def connect_torch(
    axes: str,
    groups: list[tuple[int, ...]],
    rank: int,
    timeout: timedelta | None = None,
    nccl: NcclSettings = USUAL,
) -> Transport | None:
    """Make the process groups of `groups`; return the transport of the one with `rank`, None if it is alone
    there. timeout: of their collectives; None: that of the whole world. nccl: of groups of GPUs.

    Collective over the whole world, not only over members: torch names groups by counting them, so all ranks
    must make the same groups. Raises CommunicationError where others do not make them in time.
    """
    from .gloo import GlooTransport

    timeout = timeout or world_timeout()
    mine: TorchTransport | None = None
    options = nccl.options(groups, timeout) if _has_nccl() else None
    control = control_group(timeout) if _has_nccl() else None
    num_lanes = NUM_STREAMS.get(axes, 0) if _has_nccl() else 0
    for ranks in groups:
        if len(ranks) > 1:
            made = [
                _new_group(list(ranks), timeout, axes, options)
                for _ in range(1 + num_lanes)
            ]
            if rank in ranks:
                mine = transport_over(made[0], axes, made[1:], control)
    if num_lanes and mine is not None:
        mine.open_lanes(torch.device("cuda", torch.cuda.current_device()))
    if isinstance(mine, GlooTransport) and axes in ACTIVATION_AXES:
        mine.open_slots()
    return mine


def _new_group(
    ranks: list[int], timeout: timedelta | None, axes: str, options: Any
) -> Any:
    import torch.distributed as dist

    try:
        with only_errors(), places.WAITING:
            return dist.new_group(
                ranks,
                timeout=timeout,
                backend="nccl" if _has_nccl() else None,
                pg_options=options,
                group_desc=axes,
            )
    except RuntimeError as error:
        call = f" in {current_call()}" if current_call() else ""
        raise CommunicationError(
            f"rank {dist.get_rank()}{call}: the {axes} group of ranks {ranks} could not be made; all "
            f"{dist.get_world_size()} ranks make all groups, in the same order. "
            f"{name_stuck_ranks() or 'Look for a rank that took another path'}. Message of the backend: "
            f"{str(error).splitlines()[0]}"
        ) from error


def world_timeout() -> timedelta | None:
    """Return the timeout with which torch.distributed was started, by this package or by the program.

    torch gives other groups its own default, 10 or 30 minutes, instead.
    """
    import torch.distributed as dist

    from .transport import timeout_of

    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return timeout_of(world)


def transport_over(
    process_group: Any,
    axes: str = "",
    lanes: Sequence[Any] = (),
    control: Any = None,
) -> "TorchTransport":
    """Return the transport over one torch ProcessGroup. lanes: others of the same ranks; control: the gloo group of
    the world, both of `TorchTransport`."""
    from .gloo import GlooTransport
    from .transport import TorchTransport

    return (
        TorchTransport(process_group, axes, lanes, control)
        if _has_nccl()
        else GlooTransport(process_group, axes)
    )


def _has_nccl() -> bool:
    import torch.distributed as dist

    return "nccl" in dist.get_backend_config()
