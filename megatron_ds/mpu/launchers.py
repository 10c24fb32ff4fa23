"""Launches from the variables of torchrun, Slurm, and the launchers of MPI."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from ..launch_env import SLURM, TORCHRUN, Variables, port_of_job
from .launch_facts import DEFAULT_PORT, LOCAL, Launch, integer_in


def launch_of(launcher: Variables, env: Mapping[str, str]) -> Launch:
    """Return the launch that a launcher's variables describe. Raises ConfigError."""
    if launcher is TORCHRUN:
        return _torchrun(env)
    return _slurm(env) if launcher is SLURM else _mpi(env, launcher)


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
    world_size = integer_in(env, "WORLD_SIZE")
    if not address and world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size} but MASTER_ADDR is not set: the ranks cannot find rank "
            "0. torchrun sets it; without torchrun, set it to the host of rank 0."
        )
    rank = integer_in(env, "RANK")
    # A rank's GPU cannot be guessed on several hosts.
    if not env.get("LOCAL_RANK") and world_size > 1 and address not in LOCAL:
        raise ConfigError(
            "LOCAL_RANK is not set: it selects the GPU of a rank. torchrun sets it; without "
            "torchrun, set it to 0 in the first process of each machine, to 1 in the second, "
            "and so on."
        )
    # On one host, numbers on the host are those of the world.
    local_rank = integer_in(env, "LOCAL_RANK", rank)
    local_size = integer_in(
        env, "LOCAL_WORLD_SIZE", world_size if address in LOCAL else local_rank + 1
    )
    return Launch(
        rank,
        world_size,
        local_rank,
        local_size,
        address or "127.0.0.1",
        integer_in(env, "MASTER_PORT", DEFAULT_PORT),
        "torchrun",
    )


def _slurm(env: Mapping[str, str]) -> Launch:
    """Variables of the job *step* come first: `srun -n 2` in an allocation of eight tasks is two ranks."""
    # The numbers of this task.
    size = integer_in(
        env,
        "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS",
    )
    rank = integer_in(env, "SLURM_PROCID")
    local_rank = integer_in(env, "SLURM_LOCALID", 0)
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
    local_size = _tasks_on_node(env, integer_in(env, "SLURM_NODEID", 0)) or -(
        -size // max(1, len(hosts))
    )
    job = (
        _first(env, "SLURM_JOB_ID", "SLURM_JOBID") + "." + env.get("SLURM_STEP_ID", "")
    )
    port = integer_in(env, "MASTER_PORT", port_of_job(job, DEFAULT_PORT))
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
    rank = integer_in(env, of.rank)
    size = integer_in(env, _first_name(env, of.sizes))
    # How many of the ranks are here; 0 if it is not known.
    here = _first_name(env, of.local_sizes)
    local_size = integer_in(env, here) if here else 0
    if of.hosts and integer_in(env, of.hosts, 0) == 1 or size == 1:
        local_size = size
    # Rank 0 is on this host, or at MASTER_ADDR.
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        where = f" on several machines, {local_size} of them here" if local_size else ""
        raise ConfigError(
            f"{of.launcher} started {size} ranks{where}, but MASTER_ADDR is not set: the host of rank 0 is unknown. "
            f"Run {of.option}<host of rank 0>."
        )
    is_local = local_size == size or address in LOCAL
    local_name = _first_name(env, (*of.local_ranks, *TORCHRUN.local_ranks))
    if not local_name and not is_local:
        raise ConfigError(
            f"{of.launcher} started {size} ranks, and sets none of {', '.join(of.local_ranks)}, which select the GPU "
            "of a rank. Set LOCAL_RANK in each process: to 0 in the first one of a host, to 1 in the second, and so "
            "on."
        )
    local_rank = integer_in(env, local_name, rank) if local_name else rank
    local_size = local_size or (size if is_local else local_rank + 1)
    port = integer_in(
        env, "MASTER_PORT", port_of_job(_first(env, *of.job), DEFAULT_PORT)
    )
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
