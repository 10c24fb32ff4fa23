"""Start `megatron-ds launch` in tests, and read what it prints."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.limits import HUNG

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("programs.py"))
LEAST = 1.0  # grace period of ranks that do not end


class Launcher:
    """A launcher that runs: `text` is what it has printed up to now."""

    def __init__(self, words: Sequence[str], folder: Path, **variables: str):
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_ds", "launch", *words],
            cwd=folder,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def wait_for(self, *texts: str) -> None:
        """Wait until all texts have been printed."""
        end = time.monotonic() + HUNG
        while not all(text in self.text for text in texts):
            assert time.monotonic() < end, f"no {texts} in {self.text}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        try:
            code = self.process.wait(timeout=HUNG)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still runs: {self.text}") from None
        self._reader.join(timeout=60)
        return code

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.append(line)


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process, in which ranks find this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


def launch(words: Sequence[str], folder: Path, **variables: str) -> tuple[int, str]:
    """(exit code, output) of `megatron-ds launch`."""
    started = Launcher(words, folder, **variables)
    return started.end(), started.text


def printed(text: str) -> list[dict]:
    """What ranks with the action "print" got, in the order of ranks."""
    found = []
    for line in text.splitlines():
        start = line.find('{"rank"')  # pdsh puts the host before it
        if start >= 0:
            found.append(json.loads(line[start:]))
    return sorted(found, key=lambda values: values["rank"])


def children_of(process: int) -> list[int]:
    """Ids of the processes that the main thread of a process has started."""
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()]


def processes_of(folder: Path) -> list[int]:
    """Ids of the processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if Path(os.readlink(entry / "cwd")) == folder:
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def all_end(folder: Path, seconds: float = HUNG) -> bool:
    """Whether the processes that work in a folder end in time."""
    end = time.monotonic() + seconds
    while processes_of(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
