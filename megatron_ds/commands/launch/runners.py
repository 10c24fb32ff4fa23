"""`Runner`: how the agents of the nodes are started. One command line for each process that the launcher starts.

| runner | commands |
|---|---|
| local | the agent itself |
| ssh | one ssh a host |
| pdsh | one pdsh for all hosts |
| slurm | one srun, a task a node |
| openmpi | one mpirun, a process a node |

Each runs the same agent with the same word for the job, so ranks, environment and logs are alike everywhere. A
command for a remote shell has quoted words only.
"""

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...errors import ConfigError
from .job import Job

AGENT = "megatron_ds.commands.launch.agent"
FANOUT = 1024  # connections of pdsh at a time


@dataclass(frozen=True)
class Means:
    """What the runners need besides the job.

    python      the interpreter of the agents
    arguments   words for the runner's own program (--launcher_args)
    ssh_port    of remote hosts
    activation  a script that a remote shell reads first (--venv_script)
    comment     of the Slurm job step
    """

    python: str
    arguments: Sequence[str] = ()
    ssh_port: int | None = None
    activation: str = ""
    comment: str = ""


@dataclass(frozen=True)
class Started:
    """A process that the launcher starts: its command line, and variables that it needs."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def agent_words(job: Job, means: Means, *host: str) -> list[str]:
    """The command line of an agent."""
    words = [means.python, "-u", "-m", AGENT, "--job", job.encoded()]
    return [*words, *(["--host", *host] if host else [])]


def remote_text(job: Job, means: Means, *host: str) -> str:
    """The same for the shell of another host."""
    path = job.variables.get("PYTHONPATH", "")
    run = shlex.join(["env", f"PYTHONPATH={path}", *agent_words(job, means, *host)])
    steps = [f"cd {shlex.quote(job.folder)}"]
    if means.activation:
        steps.append(f". {shlex.quote(means.activation)}")
    return " && ".join([*steps, f"exec {run}"])


def local(job: Job, means: Means) -> list[Started]:
    """The agent of the only host."""
    [host] = job.hosts
    return [Started(agent_words(job, means, host))]


def ssh(job: Job, means: Means) -> list[Started]:
    """One connection a host."""
    port = ["-p", str(means.ssh_port)] if means.ssh_port else []
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", *port]
    return [
        Started(
            ["ssh", *options, *means.arguments, host, remote_text(job, means, host)]
        )
        for host in job.hosts
    ]


def pdsh(job: Job, means: Means) -> list[Started]:
    """One pdsh, which puts the number of each host in the place of %n."""
    port = f" -p {means.ssh_port}" if means.ssh_port else ""
    variables = {"PDSH_RCMD_TYPE": "ssh"}
    if port:
        variables["PDSH_SSH_ARGS_APPEND"] = f"-o BatchMode=yes{port}"
    options = ["-S", "-f", str(FANOUT), *means.arguments, "-w", ",".join(job.hosts)]
    # of the whole text only the last word holds a %: the others are base64 and paths
    text = remote_text(job, means).replace("%", "%%") + " --host %n"
    return [Started(["pdsh", *options, text], variables)]


def slurm(job: Job, means: Means) -> list[Started]:
    """One task a node of the allocation, or of those that the job names."""
    count = str(len(job.slots))
    words = ["srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"]
    words += ["--kill-on-bad-exit=1", "--export=ALL", "--chdir", job.folder]
    words += ["--nodelist", ",".join(job.hosts)]
    if means.comment:
        words += ["--comment", means.comment]
    return [Started([*words, *means.arguments, *agent_words(job, means)])]


def openmpi(job: Job, means: Means) -> list[Started]:
    """One process a host, in the order of the job's hosts."""
    hosts = ",".join(f"{host}:1" for host in job.hosts)
    words = ["mpirun", "-n", str(len(job.slots)), "--host", hosts, "--map-by", "node"]
    words += ["--wdir", job.folder, "-x", "PYTHONPATH"]
    path = {"PYTHONPATH": job.variables.get("PYTHONPATH", "")}
    return [Started([*words, *means.arguments, *agent_words(job, means)], path)]


Runner = Callable[[Job, Means], list[Started]]
RUNNERS: dict[str, Runner] = {
    "local": local,
    "ssh": ssh,
    "pdsh": pdsh,
    "slurm": slurm,
    "openmpi": openmpi,
}
PROGRAMS = {"ssh": "ssh", "pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}
# Launchers of DeepSpeed that are not here.
INSTEAD = {
    "mpich": "openmpi or slurm",
    "impi": "openmpi or slurm",
    "mvapich": "openmpi or slurm",
}


def runner_named(name: str) -> Runner:
    """The runner of --launcher. Raises ConfigError for an unknown one, and where its program is missing."""
    if name in INSTEAD:
        raise ConfigError(f"--launcher {name} is not supported; use {INSTEAD[name]}.")
    if name not in RUNNERS:
        raise ConfigError(f"--launcher {name} is not known: use {', '.join(RUNNERS)}.")
    program = PROGRAMS.get(name)
    if program and not shutil.which(program):
        others = [n for n, p in PROGRAMS.items() if shutil.which(p)]
        raise ConfigError(
            f"--launcher {name} needs the program {program}, which is not installed here. "
            f"Installed: {', '.join(others) or 'none of the others'}."
        )
    return RUNNERS[name]
