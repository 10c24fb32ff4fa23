"""Ranks as real processes over gloo: what users run, for what threads cannot show.

    def my_test(rank, world, scale):                        # at the top level of a module: it travels by name
        group = world.group("tp", (0, 1, 2), rank)
        ...
    results = run_processes(3, my_test, 2.0)                # in rank order

`world` offers what `ThreadWorld` offers (`group`, `connect`, `size`, `traffic`), so one function can run in
both harnesses; inside, torch.distributed is initialised with exactly those ranks. Processes are started once
per pytest run and used again by later calls, each call on a fresh world. The first exception of any rank is
raised in the test, with the rank and its traceback as a note; processes that did not answer are thrown away,
as are those that may still try to meet others (Note: unfinished meetings).
Arguments and results are pickled: return numbers or CPU tensors. The tests' own process never touches
torch.distributed.
"""

import atexit
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

MEETING = "rendezvous"  # name of the thread in megatron_ds/mpu/rendezvous.py

# Note: unfinished meetings.  torch cannot be stopped while it connects to a store: the thread of `meet` goes
# on after the error. It would join whichever store listens next at its port, as a rank of that job, and all
# ranks there would wait for it. So a process with such a thread is not used again.

GRACE_SECONDS = 10  # for the peers of a failed rank to tell their own error


def run_processes(
    size: int,
    function,
    *args,
    timeout: float = HUNG,
    joined: bool = True,
    grace: float = GRACE_SECONDS,
) -> list:
    """Run `function(rank, world, *args)` on `size` processes; the results in rank order. Raises the first
    error.

    joined: False leaves it to the function to initialise torch.distributed, as an entry script does.
    grace: seconds that the peers of a failed rank have left
    """
    ranks = _started(size)
    with tempfile.TemporaryDirectory() as folder:
        job = pickle.dumps(
            (
                function,
                args,
                size,
                os.path.join(folder, "store") if joined else None,
                timeout,
            )
        )
        for i, rank in enumerate(ranks):
            rank.connection.send((i, job))
        answers, unfinished = _collect(ranks, timeout, grace)
        # before the folder goes: a rank that still waits writes into the store
        for i in unfinished:
            ranks[i].kill()
            _POOL.remove(ranks[i])
    if any(not good for good, _ in answers.values()) or len(answers) < size:
        _fail(ranks, answers, function, timeout)
    return [pickle.loads(answers[i][1]) for i in range(size)]


def stop_processes() -> None:
    """End the idle processes; the next call starts new ones."""
    while _POOL:
        _POOL.pop().kill()


_POOL: list["_Rank"] = []
atexit.register(stop_processes)


def _started(size: int) -> list["_Rank"]:
    """The first `size` processes of the pool, all ready to work: the time of a call does not pay for
    importing torch."""
    new = [_Rank() for _ in range(size - len(_POOL))]
    for rank in new:
        if not rank.is_ready():
            raise RuntimeError(
                f"a rank did not start within {HUNG} s: {rank.last_words()}"
            )
    _POOL.extend(new)
    return _POOL[:size]


class _Rank:
    """One process, seen from the test."""

    def __init__(self):
        self.connection, theirs = Pipe()
        self.errors = tempfile.NamedTemporaryFile(prefix="rank-", suffix=".stderr")
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        self.process = subprocess.Popen(
            [warm_python(), "-c", "from tests.harness.processes import serve; serve()"],
            env=environment,
            stdin=theirs.fileno(),
            stderr=self.errors,
            cwd=Path(__file__).parents[2],
        )
        theirs.close()

    def is_ready(self) -> bool:
        try:
            return self.connection.poll(HUNG) and self.connection.recv() == "ready"
        except EOFError:
            return False

    def where(self) -> str:
        """The Python stack of a rank that does not answer."""
        if self.process.poll() is not None:
            return self.last_words()
        before = words = self.last_words()
        self.process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.3)
            text = self.last_words()
            # It has written something, and nothing since the last look.
            if before != text == words:
                break
            words = text
        return words

    def last_words(self) -> str:
        return Path(self.errors.name).read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.errors.close()


def _collect(
    ranks: list[_Rank], timeout: float, grace: float
) -> tuple[dict[int, tuple[bool, bytes]], list[int]]:
    """(answers in order of arrival, till all came, or the time is over, or a while after the first bad one;
    the ranks whose meeting is unfinished)."""
    answers, unfinished = {}, []
    waiting = {rank.connection: i for i, rank in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            i = waiting.pop(connection)
            try:
                *answer, is_unfinished = connection.recv()
                answers[i] = tuple(answer)
                unfinished += [i] * is_unfinished
            except EOFError:
                ranks[i].process.wait(HUNG)
                answers[i] = (False, pickle.dumps((None, "")))
            if not answers[i][0]:
                deadline = min(deadline, time.monotonic() + grace)
    return answers, unfinished


def _fail(ranks, answers, function, timeout) -> None:
    """Throw away the processes that did not answer; raise the most specific error: not a broken line, if
    there is other."""
    from megatron_ds.errors import CommunicationError

    bad = [
        (i, *pickle.loads(answer)) for i, (good, answer) in answers.items() if not good
    ]
    stacks = (
        {i: rank.where() for i, rank in enumerate(ranks) if i not in answers}
        if not bad
        else {}
    )
    words = {i: ranks[i].last_words() for i, error, _ in bad if error is None}
    codes = {i: ranks[i].process.poll() for i, error, _ in bad if error is None}
    for i, rank in enumerate(ranks):
        if (i not in answers or i in codes) and rank in _POOL:
            rank.kill()
            _POOL.remove(rank)
    if not bad:
        raise TimeoutError(
            f"{function.__name__}: ranks {sorted(stacks)} of {len(ranks)} did not end within "
            f"{timeout} s. "
            + "".join(f"\n--- rank {i} is at\n{text}" for i, text in stacks.items())
        )
    # the earliest, as min is stable
    i, error, story = min(bad, key=lambda b: isinstance(b[1], CommunicationError))
    if error is None:
        error = RuntimeError(
            f"rank {i} of {len(ranks)} died in {function.__name__} with exit code "
            f"{codes[i]}: {words[i]}"
        )
    error.add_note(f"on rank {i} of {len(ranks)}:\n{story}")
    raise error


# What follows runs in the processes.


class ProcessWorld:
    """The world of one call, seen from one rank."""

    def __init__(self, size: int):
        from megatron_ds.mpu.group import Traffic

        self.size = size
        self.traffic = [Traffic() for _ in range(size)]

    def connect(self, axes, groups, rank):
        """What `Mesh` asks for. Collective over the whole world."""
        from megatron_ds.mpu.process_groups import connect_torch

        return connect_torch(axes, groups, rank)

    def group(self, axes, ranks, rank):
        """The group of `ranks`, which must hold `rank`. Only those ranks need call.

        torch names such a group by its ranks and by how many groups the process has made before: the ranks of
        a group must have made equally many.
        """
        import torch.distributed as dist

        from megatron_ds.mpu.group import Group
        from megatron_ds.mpu.process_groups import transport_over

        ranks = tuple(ranks)
        transport = None
        if len(ranks) > 1:
            transport = transport_over(
                dist.new_group(list(ranks), use_local_synchronization=True), axes
            )
        return Group(axes, ranks, ranks.index(rank), transport, self.traffic[rank])


def serve() -> None:
    """Main of a process: answer jobs till the test's process goes away."""
    import torch.distributed  # noqa: F401

    connection = Connection(os.dup(sys.stdin.fileno()))
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection.send("ready")
    while True:
        try:
            rank, job = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = True, pickle.dumps(_work(rank, job))
        except BaseException as error:  # noqa: BLE001  the test must see whatever it was
            answer = False, _packed(error, traceback.format_exc())
        connection.send((*answer, _is_unfinished()))


def _is_unfinished() -> bool:
    """Whether a meeting goes on, or has made a process group that the job has left."""
    import torch.distributed as dist

    return dist.is_initialized() or any(
        thread.name == MEETING for thread in threading.enumerate()
    )


def _work(rank: int, job: bytes):
    import torch
    import torch.distributed as dist

    from megatron_ds.mpu.mesh import set_mesh

    torch.set_num_threads(1)
    set_mesh(None)  # of an earlier job, whose groups are gone
    function, args, size, store, timeout = pickle.loads(job)
    if store is None:
        return function(rank, ProcessWorld(size), *args)
    store, time_limit = dist.FileStore(store, size), timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=time_limit
    )
    try:
        _wait_for_peers(store, size, time_limit)
        return function(rank, ProcessWorld(size), *args)
    finally:
        dist.destroy_process_group()


def _wait_for_peers(store, size: int, time_limit: timedelta) -> None:
    """Return when every rank has joined. A rank that leaves while a peer still connects would break the
    peer's connections, and gloo may hang when such a process joins its next world."""
    if store.add("joined", 1) == size:
        store.set("all joined", "1")
    store.wait(["all joined"], time_limit)


def _packed(error: BaseException, story: str) -> bytes:
    try:
        packed = pickle.dumps((error, story))
        pickle.loads(packed)
        return packed
    except Exception:  # noqa: BLE001  some exceptions cannot travel
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), story))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
