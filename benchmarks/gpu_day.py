"""Everything that is to be known about one GPU, in one command and one file of results (`make gpu`).

    python benchmarks/gpu_day.py                    # under ten minutes on one H200
    python benchmarks/gpu_day.py --rehearse         # tiny sizes on any machine: does every part run?

Parts run one after the other, each with a limit of time, so that one that hangs or fails costs its own
results only. The file `gpu-results.json` (--output) is written after each part: the device, versions, and of
each part its exit code, seconds, last lines and figures. Exit code 1 if a part failed.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[1]
LINES = 30  # of the output of a part that are kept


@dataclass(frozen=True)
class Part:
    """A command. figures: it writes a JSON file to the path that stands for FILE. tool: program it needs."""

    name: str
    command: str
    seconds: int
    figures: bool = False
    tool: str = ""


PARTS = (
    Part(
        "tests", "PYTHON -m pytest -q -p no:cacheprovider tests/gpu tests/kernels", 150
    ),
    Part(
        "memcheck",
        "compute-sanitizer --tool memcheck --error-exitcode 9 PYTHON benchmarks/kernels.py "
        "--rehearse --no-compile",
        45,
        tool="compute-sanitizer",
    ),
    Part(
        "racecheck",
        "compute-sanitizer --tool racecheck --error-exitcode 9 PYTHON benchmarks/kernels.py "
        "--rehearse --no-compile",
        45,
        tool="compute-sanitizer",
    ),
    Part("training", "PYTHON benchmarks/gpu_train.py --json FILE", 150, figures=True),
    Part(
        "training-torch-kernels",
        "PYTHON benchmarks/gpu_train.py --only gpt-1.3b --steps 8 --json FILE -- "
        "--kernels torch",
        50,
        figures=True,
    ),
    Part(
        "kernels",
        "PYTHON benchmarks/kernels.py --budget 120 --json FILE",
        150,
        figures=True,
    ),
)
REHEARSED = (
    Part("tests", "PYTHON -m pytest -q -p no:cacheprovider tests/gpu", 120),
    Part(
        "training",
        "PYTHON benchmarks/gpu_train.py --rehearse --steps 2 --json FILE",
        120,
        figures=True,
    ),
    Part(
        "kernels",
        "PYTHON benchmarks/kernels.py --rehearse --no-compile --budget 100 --json FILE",
        120,
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
        code = exit_code(words, part.seconds, output)
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


def exit_code(words: list[str], seconds: int, output: IO[bytes]) -> int | str:
    """Run a command with all that it starts, for at most so long. Its output goes to a file: a pipe would be
    waited for until the compilers that torch.compile has started close it, too."""
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds} s"
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
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-results.json")
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
