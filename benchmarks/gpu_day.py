"""Everything that is to be known about one GPU, in one command and one file of results (`make gpu`).

    python3 benchmarks/gpu_day.py                    # at most nine minutes on one H100 or H200
    python3 benchmarks/gpu_day.py --rehearse         # tiny sizes on any machine: does every part run?

It needs no network and no installation: torch, transformers, pytest and hypothesis, and this checkout. Parts run
one after the other, the most valuable first, each with a limit of time, so that one that hangs or fails costs
its own results only. The file `gpu-results.json` is written after each part, into the folder that the
environment variable OUT names, or into the checkout (--output chooses another place): the device, versions, and
of each part its exit code, seconds, last lines and figures. Exit code 1 if a part failed.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[1]
LINES = 60  # of the output of a part that are kept


@dataclass(frozen=True)
class Part:
    """A command.

    seconds: after which it is stopped
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


TESTS = "PYTHON -m pytest -vv --tb=short -p no:cacheprovider tests/gpu"
TRAIN = "PYTHON benchmarks/gpu_train.py --json FILE"
PEER = "PYTHON benchmarks/gpu_peer.py --json FILE"
KERNELS = "PYTHON benchmarks/kernels.py --json FILE"
SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
CHECKED = "PYTHON benchmarks/kernels.py --rehearse --no-compile"
# torch's allocator hands out parts of blocks of 2 MiB, in which the memory checker sees no bounds.
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

PARTS = (
    Part("training", TRAIN, 140, figures=True),
    Part("tests", TESTS, 110),
    Part("kernels", f"{KERNELS} --budget 100", 120, figures=True),
    Part("torch-compile", PEER, 60, figures=True),
    Part(
        "training-torch-kernels",
        f"{TRAIN} --only gpt-1.3b --steps 8 -- --kernels torch",
        40,
        figures=True,
    ),
    Part(
        "memcheck",
        f"{SANITIZER} memcheck {CHECKED}",
        40,
        tool="compute-sanitizer",
        environment=NO_CACHE,
    ),
    Part(
        "racecheck",
        f"{SANITIZER} racecheck {CHECKED}",
        30,
        tool="compute-sanitizer",
    ),
)
REHEARSED = (
    Part("training", f"{TRAIN} --rehearse --steps 2", 120, figures=True),
    Part("tests", TESTS, 120),
    Part(
        "kernels",
        f"{KERNELS} --rehearse --no-compile --budget 100",
        120,
        figures=True,
    ),
    Part("torch-compile", f"{PEER} --rehearse", 120, figures=True),
    Part(
        "training-torch-kernels",
        f"{TRAIN} --rehearse --only gpt-tiny --steps 2 -- --kernels torch",
        60,
        figures=True,
    ),
)


def run(part: Part, folder: Path) -> dict:
    """Run a part; its entry in the file."""
    if part.tool and not shutil.which(part.tool):
        return {"skipped": f"{part.tool} is not installed"}
    file = folder / f"{part.name}.json"
    meant = {"PYTHON": sys.executable, "FILE": str(file)}
    words = [meant.get(word, word) for word in part.command.split()]
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        code = exit_code(words, part, output)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    entry = {
        "code": code,
        "seconds": round(time.monotonic() - start, 1),
        "output": lines[-LINES:],
    }
    if part.figures and file.exists():
        entry["figures"] = json.loads(file.read_text())
    return entry


def exit_code(words: list[str], part: Part, output: IO[bytes]) -> int | str:
    """Run the words of a part's command with all that it starts, for at most its seconds.

    The output goes to a file: a pipe would be waited for until the compilers that torch.compile has started
    close it, too.
    """
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, **part.environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(part.seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {part.seconds} s"
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine() -> dict:
    """What the figures were measured on."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": "CPU"}
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        found |= {
            "device": of.name,
            "memory_gib": of.total_memory / 2**30,
            "processors": of.multi_processor_count,
        }
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found | {"commit": commit.stdout.strip()}


def main(argv: list[str] | None = None) -> int:
    """Run all parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    folder = Path(os.environ.get("OUT") or ROOT)
    parser.add_argument("--output", type=Path, default=folder / "gpu-results.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes, any machine"
    )
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU: torch.cuda.is_available() is False. --rehearse runs tiny sizes on the CPU."
        )
    results = {"machine": machine(), "parts": {}}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in REHEARSED if args.rehearse else PARTS:
            if args.only and part.name not in args.only:
                continue
            results["parts"][part.name] = entry = run(part, Path(folder))
            args.output.write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"{part.name}: {entry.get('skipped') or entry['code']}, {entry.get('seconds', 0)} s",
                flush=True,
            )
            print(
                *(f"    {line}" for line in entry.get("output", [])[-8:]),
                sep="\n",
                flush=True,
            )
    print(f"results: {args.output}")
    return int(any(entry.get("code", 0) != 0 for entry in results["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
