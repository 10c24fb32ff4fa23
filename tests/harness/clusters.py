"""Several hosts on one machine: real sshd on addresses 127.0.1.N, and a real Slurm with two slurmd.

Both are fixtures of `tests/launch/conftest.py`, which skip where the programs are not installed. All daemons run in
the foreground as children of the test, and end by their process ids.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.limits import HUNG

ROOT = Path(__file__).parents[2]


def missing(*programs: str) -> str:
    """Why this machine cannot run the daemons; "" if it can."""
    absent = [name for name in programs if not which(name)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "daemons are started by root only"


def which(name: str) -> str | None:
    """The path of a program, also of those for administrators."""
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def free_port() -> int:
    """A TCP port that nothing listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def daemon(words: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """A process that runs meanwhile."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(is_so, what: str, seconds: float = HUNG) -> None:
    """Wait until a function returns something true."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what} within {seconds} s"
        time.sleep(0.05)


def is_listening(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
        return True
    return False


# ------------------------------------------------------------------------------------------------------ sshd
@dataclass(frozen=True)
class SshHosts:
    """hosts: their names; config: a file for ssh -F, by which they are reached; starts: begin each one's sshd"""

    hosts: tuple[str, ...]
    config: Path
    starts: dict[str, Callable[[], subprocess.Popen]] = field(default_factory=dict)
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    def lose(self, host: str) -> None:
        """What the failure of a host looks like: its agent, ranks and connections end at once."""
        for process in processes_with("--host", host):
            os.kill(process, signal.SIGKILL)  # the kernel ends its ranks
        daemon = self.daemons[host]
        for process in descendants_of(daemon.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def bring_back(self, host: str) -> None:
        """The host answers again."""
        self.daemons[host] = self.starts[host]()


def processes_with(*words: str) -> list[int]:
    """Ids of the processes with these words, one after the other, in their command line."""
    found = []
    wanted = "\0".join(("", *words, ""))
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            text = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if wanted in f"{text}\0":
                found.append(int(entry.name))
    return found


def descendants_of(process: int) -> list[int]:
    """Ids of the processes that a process has started, and those that they have."""
    path = Path(f"/proc/{process}/task/{process}/children")
    children = [int(word) for word in path.read_text().split()]
    return [*children, *(each for child in children for each in descendants_of(child))]


@dataclass(frozen=True)
class Place:
    """Where the sshd of a host listens. before: words that start a program there"""

    address: str
    before: tuple[str, ...] = ()


LOOPBACK = (Place("127.0.1.1"), Place("127.0.1.2"))


@contextlib.contextmanager
def ssh_hosts(folder: Path, places: Sequence[Place] = LOOPBACK) -> Iterator[SshHosts]:
    """Hosts n1, n2, … on this machine, each with its sshd."""
    key = folder / "user_key"
    for path in (key, folder / "host_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(words, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    sections = []
    starts: dict[str, Callable[[], subprocess.Popen]] = {}
    daemons: dict[str, subprocess.Popen] = {}
    with contextlib.ExitStack() as stack:
        for i, place in enumerate(places, 1):
            address = place.address
            settings = folder / f"sshd{i}.conf"
            settings.write_text(
                f"ListenAddress {address}\nPort {port}\nHostKey {folder}/host_key\n"
                f"AuthorizedKeysFile {key}.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
                "PasswordAuthentication no\nMaxStartups 100\nPermitRootLogin yes\n"
            )
            words = [*place.before, which("sshd"), "-D", "-e", "-f", str(settings)]
            log = folder / f"sshd{i}.log"
            starts[f"n{i}"] = lambda words=words, log=log: stack.enter_context(
                daemon(words, log)
            )
            daemons[f"n{i}"] = starts[f"n{i}"]()
            sections.append(
                f"Host n{i}\n HostName {address}\n Port {port}\n User {getpass.getuser()}\n"
                f" IdentityFile {key}\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
            )
            wait_until(lambda at=address: is_listening(at, port), f"sshd {i} listens")
        config = folder / "ssh_config"
        config.write_text("".join(sections))
        yield SshHosts(tuple(starts), config, starts, daemons)


# ------------------------------------------------------------------------------------------------ networks
NETWORK = "10.213.0"


class Network:
    """Hosts in network namespaces of their own, joined by a bridge. Their interface is `eth0`; of the bridge's end of
    a host the name is in `links`."""

    def __init__(self, count: int = 2):
        self.links: dict[str, str] = {}
        self.places: list[Place] = []
        self._count = count
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as stack:
            self._undo = stack
            bridge = f"mds{os.getpid()}"
            self._make(f"link add {bridge} type bridge", f"link del {bridge}")
            _ip(f"addr add {NETWORK}.254/24 dev {bridge}")
            _ip(f"link set {bridge} up")
            for i in range(1, self._count + 1):
                self._add_host(i, bridge)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def set_link(self, host: str, state: str) -> None:
        """Plug the cable of a host in or pull it: up or down. No packet comes, and no connection is closed."""
        _ip(f"link set {self.links[host]} {state}")

    def _make(self, make: str, undo: str) -> None:
        _ip(make)
        self._undo.callback(_ip, undo)

    def _add_host(self, i: int, bridge: str) -> None:
        space = f"{bridge}n{i}"
        link = f"{bridge}v{i}"
        self._make(f"netns add {space}", f"netns del {space}")
        _ip(f"link add {link} type veth peer name eth0 netns {space}")
        _ip(f"link set {link} master {bridge} up")
        inside = f"-n {space}"
        _ip(f"{inside} link set lo up")
        _ip(f"{inside} addr add {NETWORK}.{i}/24 dev eth0")
        _ip(f"{inside} link set eth0 up")
        self.links[f"n{i}"] = link
        words = (which("ip"), "netns", "exec", space)
        self.places.append(Place(f"{NETWORK}.{i}", words))


def no_networks() -> str:
    """Why this machine cannot make network namespaces; "" if it can."""
    if reason := missing("ip"):
        return reason
    try:
        with Network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"


def _ip(words: str) -> None:
    command = [which("ip"), *words.split()]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=HUNG)


# ----------------------------------------------------------------------------------------------------- Slurm
class Slurm:
    """A Slurm with the nodes n1 and n2 on this machine."""

    nodes = ("n1", "n2")

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._stack = contextlib.ExitStack()
        self._slurmd: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Slurm":
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root")
        self._stack.close()
        for node in self.nodes:
            self._kill_tasks(node)

    def run(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Run a command of Slurm; its text."""
        environ = {**os.environ, **self.variables}
        return subprocess.run(
            words, env=environ, text=True, capture_output=True, timeout=HUNG, **options
        )

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        words = [which("slurmd"), "-D", "-N", node]
        log = self.folder / f"{node}.out"
        started = daemon(words, log, **self.variables)
        self._slurmd[node] = self._stack.enter_context(started)

    def kill_node(self, node: str) -> None:
        """End the slurmd of a node and its tasks, as a power cut does, and report the node as down."""
        self._slurmd[node].kill()
        self._slurmd[node].wait()
        self._kill_tasks(node)
        words = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"]
        self.run(*words, check=True)

    def _kill_tasks(self, node: str) -> None:
        for process in self.tasks(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def tasks(self, node: str) -> list[int]:
        """Ids of the processes that this Slurm has started on a node."""
        wanted = {
            f"SLURMD_NODENAME={node}",
            f"SLURM_CONF={self.variables['SLURM_CONF']}",
        }
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_text(errors="replace").split("\0")
                if wanted <= set(words):
                    found.append(int(entry.name))
        return found

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.run(
            "squeue", "-h", "-j", job, "-t", "all", "-o", "%T"
        ).stdout.strip()

    def _start(self) -> None:
        """Start munged, slurmctld and a slurmd for each node, and wait until all nodes are idle."""
        folder = self.folder
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(3)]
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        # credentials: munged's socket and key are in the folder, too
        munge = folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        folder.chmod(0o755)
        words = [which("munged"), "-F", "--force", "--key-file", str(munge / "key")]
        words += ["--socket", str(munge / "socket"), "--pid-file", str(munge / "pid")]
        words += ["--seed-file", str(munge / "seed"), "--log-file", str(munge / "log")]
        self._stack.enter_context(daemon(words, folder / "munged.out"))
        wait_until((munge / "socket").exists, "munged starts")
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={munge}/socket\nCryptoType=crypto/munge\nMpiDefault=none\n"
            f"SlurmctldPort={ports[0]}\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n"
            "SelectTypeParameters=CR_CPU\nAccountingStorageType=accounting_storage/none\n"
            "JobAcctGatherType=jobacct_gather/none\nSlurmdParameters=config_overrides\nReturnToService=2\nKillWait=5\nJobRequeue=1\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
            f"NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000\n"
            f"NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000\n"
            "PartitionName=main Nodes=n1,n2 Default=YES State=UP\n"
        )
        words = [which("slurmctld"), "-D"]
        started = daemon(words, folder / "slurmctld.out", **self.variables)
        self._stack.enter_context(started)
        for node in self.nodes:
            self.start_node(node)
        wait_until(self.is_idle, "both nodes are idle")

    def is_idle(self) -> bool:
        """Whether both nodes wait for jobs."""
        answer = self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()
        return answer == ["idle", "idle"]
