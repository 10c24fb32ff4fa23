"""The command line of `megatron-ds launch`: DeepSpeed's flags and some more.

megatron-ds launch train.py --config run.yaml       # all GPUs of this machine
megatron-ds launch --hostfile hosts train.py ...    # pdsh or ssh to every host
megatron-ds launch --launcher slurm train.py ...    # within salloc or sbatch
megatron-ds launch --hostfile hosts --dry-run train.py ... # prints the commands
"""

import argparse
import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ...cli import Arguments
from ...console import paragraph
from ...errors import ConfigError
from ...features import Provided, missing_wings
from ...launch_env import port_of_job
from . import devices
from .autotuning import autotune, plan_lines, program_of
from .flag_values import (
    core_list,
    count,
    port,
    ranks_of_host,
    seconds,
    shell_words,
    whole,
)
from .hostfile import Slots, chosen_slots, limited, read_hostfile
from .job import Job, RankProgram
from .layout_check import LayoutCheck
from .no_effect import is_file, sentences
from .notes import fitted, note
from .restarts import Attempts, Ended, Policy
from .runners import Means, Started, check_program, runner_named, ssh_to
from .signal_requests import Requests
from .signals import FORWARDED
from .supervise import pid_of_launcher, ranks_text, run_all
from .variables import exported_variables

DEEPSPEED_ENVIRONMENT: Provided[Callable[[dict[str, str]], dict[str, str]]] = Provided(
    "deepspeed environment"
)
HOSTFILE = Path("/job/hostfile")
PORT = 29500
PORTS_TRIED = 100
LOCAL = "localhost"
SSH_SECONDS = 30
DRY_RUN = ("--dry-run", "--print-command")
OWN = ("megatron_ds", "megatron-ds")  # their first argument is a command
# Flags of torchrun, and those with their meaning here.
TORCHRUN = {
    "--nproc_per_node": "--num_gpus",
    "--nnodes": "--num_nodes",
    "--standalone": "--num_nodes 1",
}


def parser() -> argparse.ArgumentParser:
    """Return the flags of the command. All words after the script belong to the script."""
    made = Arguments(__doc__)
    _add_hosts(made.add_argument_group("hosts").add_argument)
    _add_ways(made.add_argument_group("how the hosts are reached").add_argument)
    _add_ranks(made.add_argument_group("ranks").add_argument)
    _add_watch(made.add_argument_group("failures").add_argument)
    _add_own(made.add_argument_group("the launcher itself").add_argument)
    made.add_argument("script", help="the program that each rank runs")
    made.add_argument("arguments", nargs="*", default=(), help="its arguments")
    return made


def _add_hosts(add: Callable[..., object]) -> None:
    add(
        "-H", "--hostfile", type=Path, help="lines HOST slots=N (default /job/hostfile)"
    )
    add("-i", "--include", default="", help="hosts and slots to use: h1@h2:0,2")
    add("-e", "--exclude", default="", help="hosts and slots not to use")
    add("--num_nodes", type=count, help="use the first so many hosts")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=ranks_of_host,
        help="ranks of each host; on a machine without GPUs, processes",
    )
    add(
        "--master_addr",
        default="",
        help="address of rank 0 (default: the first host's)",
    )
    add(
        "--master_port",
        type=port,
        help="its port (default: another free one for each start)",
    )


def _add_ways(add: Callable[..., object]) -> None:
    add(
        "--launcher",
        default="",
        help="local, ssh, pdsh, slurm or openmpi (default: local on one host, else pdsh or ssh)",
    )
    add("--launcher_args", default="", help="words for pdsh, ssh, srun or mpirun")
    add("--ssh_port", type=port, help="port of ssh on the hosts")
    add("--no_ssh_check", action="store_true", help="do not try the first host first")
    add(
        "--no_ssh",
        action="store_true",
        help="start this host's ranks only; run the same on each host, with --node_rank",
    )
    add("--node_rank", type=int, default=-1, help="number of this host, with --no_ssh")
    add("--force_multi", action="store_true", help="use the launcher for one host, too")
    add("--venv_script", default="", help="script that remote shells read first")
    add("--comment", default="", help="of the Slurm job step")


def _add_ranks(add: Callable[..., object]) -> None:
    # The program.
    add("--module", action="store_true", help="the script is a module, as of python -m")
    add("--no_python", action="store_true", help="the script runs by itself")
    add(
        "--as-deepspeed",
        action="store_true",
        help="import deepspeed, in the script and its libraries, imports this package",
    )
    add(
        "--no_local_rank",
        action="store_true",
        help="do not give --local_rank=N to the script; commands of megatron_ds get none",
    )
    # Its output, cores and end.
    add(
        "--log-dir",
        "--enable_each_rank_log",
        default="",
        help="folder of a log file for each rank",
    )
    add("--bind_cores_to_rank", action="store_true", help="share out the host's cores")
    add("--bind_core_list", default="", help="the cores to share out: 0-15,32")
    add(
        "--grace-seconds",
        type=seconds,
        default=30.0,
        help="from SIGTERM to SIGKILL (30)",
    )


def _add_watch(add: Callable[..., object]) -> None:
    add(
        "--max-restarts",
        type=whole,
        default=0,
        help="start the job again so often, after a crash, a hang or the loss of a host (0)",
    )
    add(
        "--min-nodes",
        type=count,
        help="with --max-restarts: fewest hosts of a start: others are left out if they do not answer or fail "
        "repeatedly (default: all)",
    )
    # What is taken for a hang.
    add(
        "--hang-seconds",
        type=seconds,
        default=8.0,
        help="a rank that does nothing for so long and two median steps is named; 0: ranks are not watched (8)",
    )
    add(
        "--end-seconds",
        type=seconds,
        default=60.0,
        help="the run ends, with code 75, if a rank that was named does nothing for so long after it (60)",
    )
    add(
        "--patience-seconds",
        type=seconds,
        default=1800.0,
        help="the same while a rank starts, saves, or reads data (1800)",
    )


def _add_own(add: Callable[..., object]) -> None:
    add(*DRY_RUN, action="store_true", help="print the commands")
    add("--save_pid", action="store_true", help="write TMP/PID.deepspeed while it runs")
    add(
        "--autotuning",
        default="",
        help="tune or run: search the fastest JSON of a program with an engine by short trials, and start it",
    )
    add("--log_level", default="info", help=argparse.SUPPRESS)
    add(
        "-q", "--quiet", action="store_true", help="print nothing but the ranks' output"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Start the job and wait for its end. Return the exit code of the rank that failed first."""
    args = _parsed(argv)
    if args.autotuning:
        words = sys.argv[1:] if argv is None else list(argv)
        program = program_of(*_untuned(words))
        if args.dry_run:
            lines = "\n".join(plan_lines(program, args.autotuning))
            print(fitted(lines, sys.stdout))
            return 0
        return autotune(program, args.autotuning)
    # The job.
    check_combination(args)
    slots = slots_of(args, os.environ)
    name = launcher_of(args, slots)
    runner = runner_named(name)
    if not args.dry_run:
        check_program(runner, name)
    if not args.quiet:
        for sentence in sentences(args, slots, os.environ):
            note(sentence)
    means = means_of(args, name, os.environ)
    policy = policy_of(args, slots)
    job = job_of(args, slots, name, means)
    if args.no_ssh:
        means = replace(means, host=job.hosts[args.node_rank])
    # Its commands, or the job itself.
    if args.dry_run:
        print(*dry_run_lines(job, runner.start(job, means)), sep="\n")
        return 0
    with pid_of_launcher() if args.save_pid else contextlib.nullcontext():
        return attempts_of(args, job, name, means).run(slots, policy)


def dry_run_lines(job: Job, commands: Sequence[Started]) -> Iterator[str]:
    """Return what a shell runs to start the job, after a comment with its ranks and the program of one."""
    program = paragraph(shlex.join(job.program.command(0)))
    place = f"{job.master_address}:{job.master_port}"
    yield f"# {ranks_text(job)}; rank 0 at {place} runs: {program}"
    for command in commands:
        settings = [f"{key}={value}" for key, value in command.variables.items()]
        yield shlex.join([*settings, *command.words])


def check_combination(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no effect, or no meaning, together."""
    if args.module and args.no_python:
        raise ConfigError(
            "--module runs a module by Python, and --no_python runs a program without it: give one of them."
        )
    # DeepSpeed's launcher ignores it; of several hosts each would start a training of its own.
    if args.node_rank > 0 and not args.no_ssh:
        raise ConfigError(
            f"--node_rank {args.node_rank} is the number of this host for --no_ssh, which is not given: this command "
            "would start the ranks of all hosts. Add --no_ssh, or leave out --node_rank."
        )
    if args.min_nodes and not args.max_restarts:
        raise ConfigError(
            f"--min-nodes {args.min_nodes} is for starts after the first: add --max-restarts N."
        )


def policy_of(args: argparse.Namespace, slots: Slots) -> Policy:
    """Return when the job is started again. Raises ConfigError."""
    fewest = len(slots) if args.min_nodes is None else args.min_nodes
    if fewest > len(slots):
        raise ConfigError(
            f"--min-nodes {fewest}, but the job has {len(slots)} hosts: {', '.join(slots)}."
        )
    if args.max_restarts and args.no_ssh:
        raise ConfigError(
            "--max-restarts with --no_ssh: each host would start its ranks again by itself, at another time than "
            "the others. Use a launcher that starts all hosts."
        )
    return Policy(args.max_restarts, fewest)


def attempts_of(
    args: argparse.Namespace, job: Job, name: str, means: Means
) -> Attempts:
    """Return how the job is started, once or several times. job: of the first start"""
    runner = runner_named(name)
    requests = Requests()
    requests.install(FORWARDED)
    run = secrets.token_hex(4)

    def start(slots: Slots, restarts: int) -> Ended:
        made = job_of(args, slots, name, means) if restarts else job
        made = replace(made, restarts=restarts, run=run)
        return run_all(made, runner, means, requests, args.quiet)

    @functools.cache
    def check() -> LayoutCheck:
        return LayoutCheck((args.script, *args.arguments), job.world_size)

    return Attempts(
        start,
        (lambda slots: answering(slots, means)) if runner.can_probe else dict,
        lambda world_size: check().problem(world_size),
        requests.pause,
        note,
    )


def answering(slots: Slots, means: Means) -> Slots:
    """Return the hosts that ssh reaches now."""

    def is_there(host: str) -> bool:
        words = ssh_to(host, "true", means.ssh_arguments).words
        try:
            nothing = subprocess.DEVNULL
            done = subprocess.run(
                words, stdin=nothing, stdout=nothing, stderr=nothing, timeout=10
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(max_workers=64) as pool:
        found = list(pool.map(is_there, slots))
    return {host: slots[host] for host, is_found in zip(slots, found) if is_found}


def means_of(args: argparse.Namespace, name: str, environ: Mapping[str, str]) -> Means:
    """Return what the runner needs besides the job."""
    words = shell_words(args.launcher_args, "--launcher_args")
    at_port = ["-p", str(args.ssh_port)] if args.ssh_port else []
    # pdsh has a variable of its own for words of ssh
    name_of_own = "PDSH_SSH_ARGS_APPEND" if name == "pdsh" else ""
    own = shell_words(environ.get(name_of_own, ""), name_of_own)
    return Means(
        python=sys.executable,
        arguments=words if name != "ssh" else (),
        ssh_arguments=[*at_port, *own, *(words if name == "ssh" else [])],
        activation=args.venv_script,
        comment=args.comment,
    )


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if argv is None else list(argv)
    own, rest = split_words(words)
    args = parser().parse_args(own)
    args.arguments = rest
    if args.log_dir == "None":  # DeepSpeed's default, as a word
        args.log_dir = ""
    return args


def _untuned(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the launcher's flags but --autotuning and --dry-run, the script and its arguments)"""
    own, rest = split_words(words)
    left_out = ("--autotuning=", *DRY_RUN)
    flags = [word for word in own[:-1] if not word.startswith(left_out)]
    return flags, [*own[-1:], *rest]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the launcher's flags and the script, the script's arguments).

    The script is the first word that is neither a flag nor the value of one. A flag and its value become one word,
    since a value such as "--mca btl tcp" looks like a flag.
    """
    takes_value = _flags_with_values()
    names = parser()._option_string_actions
    own: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        flag = whole_flag(rest.pop(0), names)
        check_flag(flag)
        if flag in takes_value and rest:
            value = rest.pop(0)
            own.append(f"{flag}={value}" if flag.startswith("--") else flag + value)
        else:
            own.append(flag)
    return [*own, *rest[:1]], rest[1:]


def check_flag(word: str) -> None:
    """Raises ConfigError for a flag of torchrun, with the one of this launcher."""
    name, *_ = word.split("=")
    spelt = name.removeprefix("--").replace("-", "_")
    ours = TORCHRUN.get(f"--{spelt}")
    if ours:
        raise ConfigError(
            f"{name} is a flag of torchrun: use {ours} here, or start the program by torchrun."
        )


def whole_flag(word: str, names: Collection[str]) -> str:
    """Return a flag of which only the beginning is given, as DeepSpeed's launcher takes it: --num_gpu=2 is
    --num_gpus=2.

    Words that begin no flag, or several, are returned as they are.
    """
    name, equals, value = word.partition("=")
    found = [other for other in names if other.startswith(name)]
    is_short = word.startswith("--") and name not in names
    return f"{found[0]}{equals}{value}" if is_short and len(found) == 1 else word


def _flags_with_values() -> set[str]:
    found: set[str] = set()
    for action in parser()._actions:
        if action.nargs is None:
            found.update(action.option_strings)
    return found


def slots_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Slots:
    """Return the hosts and slots of the job."""
    by_count = args.num_nodes is not None or args.num_gpus is not None
    if by_count and (args.include or args.exclude):
        raise ConfigError(
            "--num_nodes and --num_gpus choose hosts and slots, and so do --include and --exclude; give one pair."
        )
    hosts = _hosts(args, environ)
    include = args.include
    visible = devices.listed(environ)
    is_chosen = args.num_gpus or include or args.exclude
    # On one machine the visible devices are its slots; where all are hidden, one rank computes on CPUs.
    if set(hosts) == {LOCAL} and visible is not None and not is_chosen:
        return {LOCAL: tuple(range(len(visible) or 1))}
    slots = chosen_slots(hosts, include, args.exclude)
    return limited(slots, args.num_nodes, args.num_gpus)


def _hosts(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, int]:
    """Host → slots: of the hostfile, of Slurm's allocation, or this machine."""
    hostfile = HOSTFILE if args.hostfile is None else args.hostfile
    if is_file(hostfile):
        return read_hostfile(hostfile)
    if args.launcher == "slurm":
        return slurm_hosts(environ, args.num_gpus)
    if args.num_nodes is not None and args.num_nodes > 1:
        raise ConfigError(
            f"--num_nodes {args.num_nodes} without a hostfile: name the hosts in a file for --hostfile, or use "
            "--launcher slurm within an allocation."
        )
    return {LOCAL: args.num_gpus or devices.count() or 1}


def slurm_hosts(environ: Mapping[str, str], per_node: int | None) -> dict[str, int]:
    """Return the nodes of Slurm's allocation, and the GPUs or tasks of each."""
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise ConfigError(
            "--launcher slurm runs within an allocation, or needs --hostfile: start it by sbatch or salloc."
        )
    words = ["scontrol", "show", "hostnames", listed]
    try:
        names = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise ConfigError(
            f"scontrol does not list the hosts of SLURM_JOB_NODELIST={listed}: {reason}. Start the launcher by "
            "sbatch or salloc, on a host with Slurm's commands."
        ) from error
    found = re.match(r"\d+", environ.get("SLURM_GPUS_ON_NODE", ""))
    tasks = re.match(r"\d+", environ.get("SLURM_NTASKS_PER_NODE", ""))
    listed_count = found or tasks
    count = per_node or (int(listed_count[0]) if listed_count else 1)
    return {name: count for name in names.stdout.split()}


def launcher_of(args: argparse.Namespace, slots: Slots) -> str:
    """Return the name of the runner."""
    if args.no_ssh:
        return "local"
    is_single = len(slots) == 1 and not args.force_multi
    if args.launcher:
        name = args.launcher.lower()
        return "local" if is_single and name in ("pdsh", "ssh", "openmpi") else name
    if is_single:
        return "local"
    return "pdsh" if shutil.which("pdsh") else "ssh"


def job_of(args: argparse.Namespace, slots: Slots, launcher: str, means: Means) -> Job:
    """Return the job of a command line. Raises ConfigError."""
    if args.no_ssh and not 0 <= args.node_rank < len(slots):
        raise ConfigError(
            f"--no_ssh needs --node_rank from 0 to {len(slots) - 1}, got {args.node_rank}."
        )
    # Relative paths mean the same on all hosts, which have this folder.
    folder = Path.cwd()
    program = RankProgram(
        (args.script, *args.arguments),
        "" if args.no_python else sys.executable,
        args.module,
        has_local_rank=not args.no_local_rank and Path(args.script).name not in OWN,
    )
    cores = core_list(args.bind_core_list) if args.bind_core_list else ()
    is_bound = args.bind_cores_to_rank or bool(args.bind_core_list)
    is_chosen = bool(args.include or args.exclude)
    name = secrets.token_hex(8)
    # The address is that of the first host, on which rank 0 is.
    return Job(
        name=name,
        slots=slots,
        program=program,
        variables=variables_of(args, folder),
        folder=str(folder),
        master_address=args.master_addr or master_address(args, slots, launcher, means),
        master_port=args.master_port or port_of(name, args.no_ssh, os.environ),
        log_folder=str(folder / args.log_dir) if args.log_dir else "",
        bound_cores=cores if is_bound else None,
        grace_seconds=args.grace_seconds,
        hang_seconds=args.hang_seconds,
        end_seconds=args.end_seconds,
        patience_seconds=args.patience_seconds,
        has_numbers=is_chosen and not devices.is_allocated(os.environ),
    )


def variables_of(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the variables of all ranks. Raises ConfigError where a package that a flag needs is not installed."""
    found = exported_variables(os.environ, Path.home(), folder)
    if not args.as_deepspeed:
        return found
    with_name = DEEPSPEED_ENVIRONMENT.find()
    if with_name is None:
        raise ConfigError(
            f"--as-deepspeed has no package to give the name deepspeed.{missing_wings()}"
        )
    return with_name(found)


def port_of(name: str, is_alone: bool, environ: Mapping[str, str]) -> int:
    """Return the port of a job where the user gives none: a free one of this machine, usually of other hosts, too.

    name: of the job; is_alone: other launchers, one on each host, must find the same port
    """
    if is_alone:
        return port_of_job(environ.get("SLURM_JOB_ID", ""), PORT)
    candidates = (port_of_job(f"{name}.{i}", PORT) for i in range(PORTS_TRIED))
    return next(filter(_is_free, candidates), PORT)


def _is_free(number: int) -> bool:
    """Return whether no process of this machine listens at a port."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", number))
        return True
    return False


def master_address(
    args: argparse.Namespace, slots: Slots, launcher: str, means: Means
) -> str:
    """Return the address of the first host: it is asked by ssh, if that works, else its name counts.

    Raises ConfigError if that host does not answer, and where its name means another machine on each host.
    """
    first = next(iter(slots))
    if len(slots) == 1 and (first == LOCAL or launcher == "local"):
        return "127.0.0.1"
    can_ask = launcher in ("ssh", "pdsh")
    if first == LOCAL and not can_ask:
        raise ConfigError(
            f"the first host is {LOCAL}, which is another machine on each of the {len(slots)} hosts: they would not "
            "find rank 0. Write its name into the hostfile, or give --master_addr."
        )
    if args.dry_run or not can_ask:
        return first
    # The question also shows whether ssh works.
    words = ssh_to(first, "hostname -I", means.ssh_arguments).words
    try:
        answer = subprocess.run(
            words, capture_output=True, text=True, timeout=SSH_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        if args.no_ssh_check:
            return first
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise ConfigError(
            f"the first host, {first}, does not answer by ssh: {reason}. Set up ssh without a password, remove "
            "the host from the hostfile, or give --master_addr and --no_ssh_check."
        ) from error
    addresses = answer.stdout.split()
    return addresses[0] if addresses else first
