"""The parts of the day on a GPU: each is stopped at its limit, says where it was, and costs its own results only."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import gpu_day
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan


def test_a_part_that_fails_or_hangs_costs_its_own_results_only(tmp_path):
    parts = (
        gpu_day.Part("fails", "PYTHON -c raise(SystemExit(3))", HUNG),
        gpu_day.Part("hangs", f"PYTHON -c __import__('time').sleep({2 * HUNG})", 1),
        gpu_day.Part("missing", "no-such-tool", 5, tool="no-such-tool"),
    )
    fails, hangs, missing = (gpu_day.run(part, tmp_path) for part in parts)
    assert fails["code"] == 3 and hangs["code"] == "stopped after 1 s"
    assert missing == {"skipped": "no-such-tool is not installed", "seconds": 0.0}


@pytest.fixture
def limit_when_ready(tmp_path, monkeypatch):
    """A part reaches its limit when it has written the file that is returned, whatever the speed of the machine."""
    ready = tmp_path / "ready"

    class Process(subprocess.Popen):
        notices = True  # an interrupt
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                while not ready.exists() and self.poll() is None:
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout)
            if self.waits == 2 and not self.notices:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(None if timeout is None else HUNG)

    monkeypatch.setattr(gpu_day.subprocess, "Popen", Process)
    # As in `main`: parts inherit an interrupt that is ignored, as in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield ready, Process
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("notices", [True, False])
def test_a_part_that_is_stopped_says_where_it_was(tmp_path, limit_when_ready, notices):
    """One that waits in Python is interrupted; one that does not notice, as in a call of the driver, is aborted."""
    ready, process = limit_when_ready
    process.notices = notices
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = tmp_path / "waits.py"
    program.write_text(
        f"""{"" if notices else ignored}
import time
def stands_here():
    open({str(ready)!r}, "w").close()
    time.sleep({HUNG})
stands_here()
"""
    )
    entry = gpu_day.run(gpu_day.Part("waits", f"PYTHON {program}", 2), tmp_path)
    text = "\n".join(entry["output"])
    assert entry["code"] == "stopped after 2 s" and "stands_here" in text
    assert ("KeyboardInterrupt" in text) == notices
    assert ("most recent call first" in text) == (not notices)


def test_a_part_that_is_stopped_has_the_failures_of_its_tests(
    tmp_path, limit_when_ready
):
    ready, _ = limit_when_ready
    program = tmp_path / "test_planted.py"
    program.write_text(
        f"""import time
def test_fails():
    assert 1 == 2
def test_hangs():
    open({str(ready)!r}, "w").close()
    time.sleep({HUNG})
"""
    )
    command = f"PYTHON -m pytest -vv --tb=short -p no:cacheprovider --rootdir {tmp_path} {program}"
    entry = gpu_day.run(gpu_day.Part("tests", command, 8), tmp_path)
    text = "\n".join(entry["output"])
    assert entry["code"] == "stopped after 8 s"
    assert "assert 1 == 2" in text and "test_hangs" in text


def test_a_part_may_take_what_those_before_it_have_left(tmp_path, monkeypatch):
    given = []

    def run(part, folder, spare):
        given.append(spare)
        return {"code": 0, "seconds": 4.0}

    parts = tuple(gpu_day.Part(f"part {i}", "PYTHON", 10) for i in range(3))
    monkeypatch.setattr(gpu_day, "REHEARSED", {"rest": parts})
    monkeypatch.setattr(gpu_day, "run", run)
    monkeypatch.setattr(gpu_day, "machine", dict)
    assert gpu_day.main(["--rehearse", "--output", str(tmp_path)]) == 0
    assert given == [0.0, 6.0, 12.0]


def test_figures_that_a_part_has_half_written_cost_nothing_else(tmp_path):
    code = "open(__import__('sys').argv[1],'w').write('[1,')"
    entry = gpu_day.run(
        gpu_day.Part("half", f"PYTHON -c {code} FILE", HUNG, figures=True), tmp_path
    )
    assert entry["code"] == 0 and "figures" not in entry


def test_a_part_has_its_environment(tmp_path):
    code = "print(__import__('os').environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])"
    part = gpu_day.Part("one", f"PYTHON -c {code}", HUNG, environment=gpu_day.NO_CACHE)
    assert gpu_day.run(part, tmp_path)["output"] == ["1"]
    parts = gpu_day.PARTS["rest"]
    [checked] = [part for part in parts if part.name == "memcheck"]
    assert checked.environment == gpu_day.NO_CACHE


CHILD = """import subprocess, sys, time
print(subprocess.Popen(["sleep", "3600"]).pid, flush=True)
open(sys.argv[1], "w").close()
time.sleep(int(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds, code", [(0, 0), (3600, "stopped after 2 s")])
def test_what_a_part_has_started_ends_with_it(
    seconds, code, tmp_path, limit_when_ready
):
    """A child that keeps the output open, as a compiler of torch.compile does, is not waited for."""
    ready, process = limit_when_ready
    process.waits = 0 if seconds else 1
    program = tmp_path / "starts.py"
    program.write_text(CHILD)
    part = gpu_day.Part("one", f"PYTHON {program} {ready} {seconds}", 2)
    entry = gpu_day.run(part, tmp_path)
    assert entry["code"] == code
    while not is_over(int(entry["output"][0])):
        time.sleep(0.01)


def is_over(pid: int) -> bool:
    """Whether a process has ended, also one for whose end its parent has not asked."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"
