"""Everything that is to be known about one GPU, in three calls of at most nine minutes (`make gpu`).

    python3 benchmarks/gpu_day.py --part headline    # steps as users train, beside plain torch: MFU, memory
    python3 benchmarks/gpu_day.py --part truth       # the tests of tests/gpu
    python3 benchmarks/gpu_day.py --part rest        # kernels, long sequences, dropout, FlexAttention, checkers
    python3 benchmarks/gpu_day.py --rehearse         # all three with tiny sizes on any machine: does every part run?

It needs no network and no installation: torch, transformers, pytest and hypothesis, and this checkout. Parts run
one after the other, the most valuable first, each with a limit of time, so that one that hangs or fails costs
its own results only. A part may take what those before it have left of their time. One that reaches its limit is
interrupted first, so that pytest prints its failures and Python the line where it was, then aborted, which prints
the lines of all threads, then killed. A call writes one file, such as `gpu-headline.json`, after each part, into the
folder that the environment variable OUT names, or into the checkout (--output chooses another folder): the device,
versions, and of each part its exit code, seconds, clocks and power before and after, last lines and figures. Exit code
1 if a part failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[1]
LINES = 300  # of the output of a part that are kept
LAST_WORDS = 5  # seconds between the limit of a part and its end
START_SECONDS = (
    40  # of a call before its first part: torch is imported from a cold disk
)
CLOCKS = (
    "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
)
SPEAKING = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Part:
    """A command.

    seconds: after which it is stopped, unless parts before it have left some of theirs
    figures: it writes a JSON file to the path that stands for FILE
    tool: a program that it needs
    environment: variables that it needs
    """

    name: str
    command: str
    seconds: int
    figures: bool = False
    tool: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


FILES = "kernel_launches one_gpu new_features ranks_as_threads nccl_alone two_gpus"
PYTEST = "PYTHON -m pytest -vv --tb=short -p no:cacheprovider"
TESTS = f"{PYTEST} " + " ".join(f"tests/gpu/test_{name}.py" for name in FILES.split())
# FlexAttention apart: its kernels are compiled for minutes.
FLEX = f"{PYTEST} tests/gpu/test_flex_attention.py"
ENVIRONMENT = "PYTHON -m megatron_ds env --json"
TRAIN = "PYTHON benchmarks/gpu_train.py --json FILE"
PEER = "PYTHON benchmarks/gpu_peer.py --json FILE"
KERNELS = "PYTHON benchmarks/kernels.py --json FILE"
SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
CHECKED = "PYTHON benchmarks/kernels.py --rehearse --no-compile"
# torch's allocator hands out parts of blocks of 2 MiB, in which the memory checker sees no bounds.
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# Call → its parts, the most valuable first.
PARTS = {
    "headline": (
        Part("environment", ENVIRONMENT, 45),
        Part("training", f"{TRAIN} --group headline", 290, figures=True),
        Part("torch-compile", PEER, 135, figures=True),
    ),
    "truth": (
        Part("tests", TESTS, 420),
        Part("environment", ENVIRONMENT, 45),
    ),
    "rest": (
        Part("kernels", f"{KERNELS} --budget 90", 105, figures=True),
        Part("training-beyond", f"{TRAIN} --group beyond", 150, figures=True),
        Part(
            "training-torch-kernels",
            f"{TRAIN} --only gpt-1.3b --steps 6 -- --kernels torch",
            55,
            figures=True,
        ),
        Part("flex-attention", FLEX, 85),
        Part(
            "memcheck",
            f"{SANITIZER} memcheck {CHECKED}",
            35,
            tool="compute-sanitizer",
            environment=NO_CACHE,
        ),
        Part(
            "racecheck",
            f"{SANITIZER} racecheck {CHECKED}",
            25,
            tool="compute-sanitizer",
        ),
    ),
}
REHEARSED = {
    "headline": (
        Part("environment", ENVIRONMENT, 60),
        Part(
            "training",
            f"{TRAIN} --rehearse --group headline --steps 2",
            180,
            figures=True,
        ),
        Part("torch-compile", f"{PEER} --rehearse", 180, figures=True),
    ),
    "truth": (
        Part("tests", TESTS, 300),
        Part("environment", ENVIRONMENT, 60),
    ),
    "rest": (
        Part(
            "kernels",
            f"{KERNELS} --rehearse --no-compile --budget 100",
            150,
            figures=True,
        ),
        Part(
            "training-beyond",
            f"{TRAIN} --rehearse --group beyond --steps 2",
            120,
            figures=True,
        ),
        Part(
            "training-torch-kernels",
            f"{TRAIN} --rehearse --only gpt-tiny --steps 2 -- --kernels torch",
            60,
            figures=True,
        ),
        Part("flex-attention", FLEX, 90),
    ),
}


def estimate(parts: Sequence[Part]) -> int:
    """The most seconds of a call: the limits of its parts, their last words, and the questions at its start."""
    limits = sum(part.seconds + LAST_WORDS for part in parts)
    return START_SECONDS + limits


def run(part: Part, folder: Path, spare: float = 0.0) -> dict:
    """Run a part; its entry in the file. spare: seconds beyond its own."""
    if part.tool and not shutil.which(part.tool):
        return {"skipped": f"{part.tool} is not installed", "seconds": 0.0}
    file = folder / f"{part.name}.json"
    meant = {"PYTHON": sys.executable, "FILE": str(file)}
    words = [meant.get(word, word) for word in part.command.split()]
    before = clocks()
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        code = exit_code(words, part, part.seconds + spare, output)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    entry = {
        "code": code,
        "seconds": round(time.monotonic() - start, 1),
        "output": lines[-LINES:],
        "clocks": [before, clocks()],
    }
    # A part that was killed may have written a half of its figures.
    if part.figures and file.exists():
        with contextlib.suppress(ValueError):
            entry["figures"] = json.loads(file.read_text())
    return entry


def exit_code(
    words: list[str], part: Part, seconds: float, output: IO[bytes]
) -> int | str:
    """Run the words of a part's command with all that it starts, for at most these seconds and LAST_WORDS.

    The output goes to a file: a pipe would be waited for until the compilers that torch.compile has started
    close it, too.
    """
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **SPEAKING, **part.environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        ask_for_last_words(process)
        return f"stopped after {seconds:.0f} s"
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clocks() -> str:
    """Clocks, power and temperature of the first GPU; "" where its driver has no program that prints them."""
    if not shutil.which("nvidia-smi"):
        return ""
    words = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "-i", "0"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        asked = subprocess.run(words, capture_output=True, text=True, timeout=10)
        return asked.stdout.strip()
    return ""


def ask_for_last_words(process: subprocess.Popen) -> None:
    """Interrupt a process, which a call into the driver may not notice, then abort it."""
    for number, seconds in ((signal.SIGINT, LAST_WORDS - 1), (signal.SIGABRT, 1)):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


FACTS = """
import json, torch
gpu = torch.cuda.is_available() and torch.cuda.get_device_properties(0)
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "CPU"}
if gpu:
    free, total = torch.cuda.mem_get_info()
    facts |= {"device": gpu.name, "memory_gib": total / 2**30, "free_gib": free / 2**30}
    facts |= {"processors": gpu.multi_processor_count}
print(json.dumps(facts))
"""


def machine() -> dict:
    """What the figures were measured on.

    Asked in a process of its own: a context of this one would hold memory, and the GPU if it takes one process.
    """
    asked = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True
    )
    found = json.loads(asked.stdout) if asked.returncode == 0 else {}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    failed = {"error": asked.stderr} if asked.returncode else {}
    return found | failed | {"commit": commit.stdout.strip()}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    folder = Path(os.environ.get("OUT") or ROOT)
    parser.add_argument("--output", type=Path, default=folder, help="folder of results")
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        default=[],
        help="calls, one after another; without it all of them",
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of parts of them")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, any machine"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the calls; the exit code."""
    args = parse_arguments(argv)
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU: torch.cuda.is_available() is False. --rehearse runs tiny sizes on the CPU."
        )
    # Parts inherit an interrupt that is ignored, as in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args.output.mkdir(parents=True, exist_ok=True)
    calls = REHEARSED if args.rehearse else PARTS
    codes = [
        run_call(name, calls[name], args.only, args.output)
        for name in args.part or calls
    ]
    return max(codes)


def run_call(name: str, parts: Sequence[Part], only: list[str], folder: Path) -> int:
    """Run the parts of a call, those of `only` if it names any; the exit code."""
    chosen = [part for part in parts if not only or part.name in only]
    seconds = estimate(chosen)
    print(f"{name}: at most {seconds} s", flush=True)
    # What the file has besides parts.
    start = time.monotonic()
    file = folder / f"gpu-{name}.json"
    results = {"machine": machine(), "estimate_s": seconds, "parts": {}}
    # Each part may take what those before it have left.
    spare = 0.0
    with tempfile.TemporaryDirectory() as figures:
        for part in chosen:
            entry = run(part, Path(figures), spare)
            spare = max(0.0, part.seconds + spare - entry["seconds"])
            results["parts"][part.name] = entry
            results["seconds"] = round(time.monotonic() - start, 1)
            file.write_text(json.dumps(results, indent=1) + "\n")
            outcome = entry.get("skipped") or entry["code"]
            print(f"{part.name}: {outcome}, {entry['seconds']} s", flush=True)
            last = entry.get("output", [])[-8:]
            print(*(f"    {line}" for line in last), sep="\n", flush=True)
    print(f"results: {file}")
    return int(any(entry.get("code", 0) != 0 for entry in results["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
