"""A warm Python: commands run in copies of an interpreter that has imported torch already.

    environment = warm_environment(environment)    # `python`, `torchrun`, `megatron-ds` start warm
    Popen([warm_python(), "-c", "..."])

Importing torch takes seconds of a slow processor, and the blocks of the pages start a hundred Pythons. Here a
server imports it once and forks for each command; a small client stands in the command's place, lends it its
descriptors, folder and environment, passes signals on and ends as it ended. What a fresh interpreter does at
its start the copy does too: arguments, `sys.path`, `__main__`, the exit code, threads that are waited for
and `atexit`. It does not take the interpreter apart at its end, which would copy all of the server's memory.
Not for tests of what a start costs or imports.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "megatron_ds.training.pretrain",
    "tests.harness.processes",
)
START_SECONDS = 600

# Name of a command → the words before its arguments.
CLIENTS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "megatron-ds": ["-m", "megatron_ds"],
}

# It must start quickly, so it knows no more than the standard library: {real} {socket}
CLIENT = """#!{real} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
words = {before!r} + sys.argv[1:]
told = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(told).to_bytes(8, "little")], [0, 1, 2])
server.sendall(told)
child = int.from_bytes(server.recv(8), "little")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(child, number))
status = server.recv(8)
if not status:
    os._exit(70)
code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_environment(environment: dict[str, str]) -> dict[str, str]:
    """The same environment, in which commands start warm. The server belongs to this process and ends with
    it."""
    bin_folder = _started()
    return environment | {"PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}"}


def warm_python() -> str:
    """The path of a `python` that starts warm."""
    return str(_started() / "python")


@functools.cache
def _started() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    path = os.path.join(folder.name, "socket")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.warm", path],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)  # which closes its stdin: it ends
    reader = selectors.DefaultSelector()
    reader.register(server.stdout, selectors.EVENT_READ)
    if not reader.select(START_SECONDS) or server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the warm Python did not start within {START_SECONDS} s")
    for name, before in CLIENTS.items():
        client = Path(folder.name, name)
        client.write_text(
            CLIENT.format(real=sys.executable, socket=path, before=before)
        )
        client.chmod(0o755)
    return Path(folder.name)


# What follows runs in the server and its copies.


def serve(path: str) -> list[str]:
    """Returns in each copy, with the words of its command; in the server never: it ends with the process that
    started it."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    selector, running = selectors.DefaultSelector(), {}
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for source in (listening, wake, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    if threading.active_count() > 1:
        raise RuntimeError("importing started threads, which a copy would not have")
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            elif key.fileobj is wake:
                wake.recv(4096)
                _tell_the_ended(running, selector)
            elif (
                key.fileobj is not listening
            ):  # a client was killed: its command is to go as well
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:
                client, _ = listening.accept()
                words, folder, environment, descriptors = _receive(client)
                child = os.fork()
                if child == 0:
                    for opened in (
                        client,
                        listening,
                        wake,
                        woken,
                        selector,
                        *running.values(),
                    ):
                        opened.close()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return _take_place(
                        os.path.dirname(path), words, folder, environment, descriptors
                    )
                for descriptor in descriptors:
                    os.close(descriptor)
                running[child] = client
                selector.register(client, selectors.EVENT_READ, child)
                client.sendall(child.to_bytes(8, "little"))


def _receive(client: socket.socket):
    size, descriptors, _, _ = socket.recv_fds(client, 8, 3)
    told, size = b"", int.from_bytes(size, "little")
    while len(told) < size:
        told += client.recv(size - len(told))
    return *json.loads(told), descriptors


def _tell_the_ended(
    running: dict[int, socket.socket], selector: selectors.BaseSelector
) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with running.pop(child) as client:
            if client in selector.get_map():  # or it was killed
                selector.unregister(client)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(status.to_bytes(8, "little"))


def _take_place(
    bin_folder: str,
    words: list[str],
    folder: str,
    environment: dict[str, str],
    descriptors: list[int],
) -> list[str]:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(
        {"PYTHON_EXEC": os.path.join(bin_folder, "python")} | environment
    )  # for torchrun
    ours = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    sys.path[1:] = [*ours, *(path for path in sys.path[1:] if path not in ours)]
    return words


def run(words: list[str]) -> None:
    """What `python WORDS` does: a file, `-m MODULE` or `-c TEXT`, with `-u` before it."""
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(
            compile(words[1], "<string>", "exec"),
            {"__name__": "__main__", "__builtins__": __builtins__},
        )
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def end(code: int) -> None:
    """What Python does at its end that others see."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_code(words: list[str]) -> int:
    """Return the exit code of a command: 0, that of sys.exit, or 1 after an error or a message, which is printed."""
    try:
        run(words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def cheapen_torchrun() -> None:
    """torchrun notes each of its steps with the name of the calling function, for which it looks through all
    files of all modules: 1.2 s of processor time of each start where as much as here is imported."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: (
        sys._getframe(depth).f_code.co_name
    )


if __name__ == "__main__":
    for module in PRELOADED:
        __import__(module)
    cheapen_torchrun()
    gc.freeze()  # else each copy's collections look at all that was imported, and so copy its memory
    end(exit_code(serve(sys.argv[1])))
