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
from .signals import OWN_NUMBER, signal_text

AGENT = "megatron_ds.extensions.launch.agent"
FANOUT = 1024  # connections of pdsh at a time
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")


@dataclass(frozen=True)
class Means:
    """What the runners need besides the job.

    python         the interpreter of the agents
    host           the host of this machine, for the local runner
    arguments      words for the runner's own program (--launcher_args)
    ssh_arguments  words for ssh: the port, and the user's own
    activation     a script that a remote shell reads first (--venv_script)
    comment        of the Slurm job step
    listens        agents read the numbers of signals from their input, and end with it
    """

    python: str
    host: str = ""
    arguments: Sequence[str] = ()
    ssh_arguments: Sequence[str] = ()
    activation: str = ""
    comment: str = ""
    listens: bool = False


@dataclass(frozen=True)
class Started:
    """A process that the launcher starts: its command line, and variables that it needs."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def agent_words(job: Job, means: Means, *host: str) -> list[str]:
    """Return the command line of an agent."""
    words = [means.python, "-u", "-m", AGENT, "--job", job.encoded()]
    if host:
        words += ["--host", *host]
    return [*words, *(["--listen"] if means.listens else [])]


def remote_text(job: Job, means: Means, *host: str) -> str:
    """Return the command line of an agent for the shell of another host."""
    path = job.variables.get("PYTHONPATH", "")
    run = shlex.join(["env", f"PYTHONPATH={path}", *agent_words(job, means, *host)])
    steps = [f"cd {shlex.quote(job.folder)}"]
    if means.activation:
        steps.append(f". {shlex.quote(means.activation)}")
    return " && ".join([*steps, f"exec {run}"])


# ------------------------------------------------------------------------------------------------- starting
def local(job: Job, means: Means) -> list[Started]:
    """Return the agent of this host."""
    return [Started(agent_words(job, means, means.host or job.hosts[0]))]


def ssh(job: Job, means: Means) -> list[Started]:
    """Start one connection for each host."""
    return [
        ssh_to(host, remote_text(job, means, host), means.ssh_arguments)
        for host in job.hosts
    ]


def ssh_to(host: str, text: str, arguments: Sequence[str]) -> Started:
    """Start a connection to a host, whose shell runs the text."""
    return Started(["ssh", *SSH_OPTIONS, *arguments, host, text])


def pdsh(job: Job, means: Means) -> list[Started]:
    """Start one pdsh, which gives each host its number."""
    # a % of paths is none of pdsh
    text = f"{remote_text(job, means).replace('%', '%%')} --host {OWN_NUMBER}"
    return [_pdsh(job, means, text)]


def _pdsh(job: Job, means: Means, text: str) -> Started:
    variables = {
        "PDSH_RCMD_TYPE": "ssh",
        "PDSH_SSH_ARGS_APPEND": shlex.join([*SSH_OPTIONS, *means.ssh_arguments]),
    }
    options = ["-S", "-f", str(FANOUT), *means.arguments, "-w", ",".join(job.hosts)]
    return Started(["pdsh", *options, text], variables)


def slurm(job: Job, means: Means) -> list[Started]:
    """Start one task on each node of the allocation, or on those that the job names; a task may use the whole node."""
    count = str(len(job.slots))
    words = ["srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"]
    words += ["--kill-on-bad-exit=1", "--export=ALL", "--chdir", job.folder]
    words += ["--cpu-bind=none", "--disable-status"]
    words += ["--nodelist", ",".join(job.hosts)]
    if means.comment:
        words += ["--comment", means.comment]
    return [Started([*words, *means.arguments, *agent_words(job, means)])]


def openmpi(job: Job, means: Means) -> list[Started]:
    """Start one process on each host, in the order of the job's hosts."""
    hosts = ",".join(f"{host}:1" for host in job.hosts)
    words = ["mpirun", "-n", str(len(job.slots)), "--host", hosts, "--map-by", "node"]
    words += ["--bind-to", "none", "--wdir", job.folder, "-x", "PYTHONPATH"]
    words += ["--stdin", "all", *means.arguments, *agent_words(job, means)]
    return [Started(words, {"PYTHONPATH": job.variables.get("PYTHONPATH", "")})]


# ------------------------------------------------------------------------------------------------ signalling
def pdsh_signals(job: Job, means: Means, number: int) -> list[Started]:
    """Start one more pdsh, which signals all agents."""
    return [_pdsh(job, means, signal_text(job, number))]


@dataclass(frozen=True)
class Runner:
    """start: the processes of a job

    program    what must be installed, "" for nothing
    signals    the processes that signal the agents; None: the started processes do
    has_input  they pass their input on to the agents, which listen: ssh, srun and mpirun end by the signals that a
               training is to see
    can_probe  ssh shows whether a host can be reached
    stays      the processes go on when the reader of their output is gone
    """

    start: Callable[[Job, Means], list[Started]]
    program: str = ""
    signals: Callable[[Job, Means, int], list[Started]] | None = None
    has_input: bool = False
    can_probe: bool = False
    stays: bool = False


RUNNERS = {
    "local": Runner(local),
    "ssh": Runner(ssh, "ssh", has_input=True, can_probe=True),
    "pdsh": Runner(pdsh, "pdsh", pdsh_signals, can_probe=True, stays=True),
    "slurm": Runner(slurm, "srun", has_input=True),
    "openmpi": Runner(openmpi, "mpirun", has_input=True),
}
# Launchers of DeepSpeed that are not here.
INSTEAD = {
    "mpich": "openmpi or slurm",
    "impi": "openmpi or slurm",
    "mvapich": "openmpi or slurm",
}


def runner_named(name: str) -> Runner:
    """Return the runner of --launcher. Raises ConfigError for an unknown one."""
    if name in INSTEAD:
        raise ConfigError(f"--launcher {name} is not supported; use {INSTEAD[name]}.")
    if name not in RUNNERS:
        raise ConfigError(f"--launcher {name} is not known: use {', '.join(RUNNERS)}.")
    return RUNNERS[name]


def check_program(runner: Runner, name: str) -> None:
    """Raises ConfigError where the program of a runner is missing. name: of the runner"""
    if runner.program and not shutil.which(runner.program):
        programs = [other.program for other in RUNNERS.values() if other.program]
        others = [program for program in programs if shutil.which(program)]
        raise ConfigError(
            f"--launcher {name} needs the program {runner.program}, which is not installed here. "
            f"Installed: {', '.join(others) or 'none of the others'}."
        )
