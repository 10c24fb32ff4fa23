"""Install the wheel and the source distribution of a folder where there is no compiler, and train with each.

python .ci/check_wheel.py dist

Each goes into a virtual environment of its own. PATH has nothing but that environment, and CC and CXX always fail. The
wheel has its compiled parts all the same, the source distribution must do without, and both train to equal losses.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

JOB = (
    "--mock-data --vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 0 --lr 1e-3 --log-interval 1"
).split()
WITHOUT = "no C++ module of this package is compiled"
TOLERANCE = 1e-4  # of losses near 6, which kernels and torch round differently


def run(folder: Path, *words: str) -> str:
    """Run a program of a virtual environment. Returns what it prints; ends this one with it where it fails."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "PATH": str(folder / "bin"),
        "CC": "/bin/false",
        "CXX": "/bin/false",
    }
    done = subprocess.run(
        [str(folder / "bin" / words[0]), *words[1:]],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with code {done.returncode}:\n{done.stdout}")
    return done.stdout


def losses_with(
    built: Path, folder: Path, torch: str | None
) -> tuple[list[float], bool]:
    """(losses of a small training, whether it ran without compiled parts) of what is installed from a file.

    torch: a requirement that is installed first; None: the one of the package
    """
    venv.create(folder, with_pip=True)
    if torch is not None:
        run(folder, "python", "-m", "pip", "install", "--quiet", torch)
    run(folder, "python", "-m", "pip", "install", "--quiet", str(built))
    run(folder, "megatron-ds", "plan", *JOB)
    printed = run(folder, "megatron-ds", "train", *JOB, "--save", "run")
    run(folder, "megatron-ds", "verify", "--load", "run")
    run(folder, "megatron-ds", "generate", "--load", "run", "--prompt", "1 2 3")
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [each["loss"] for each in records if each["kind"] == "train"]
    return losses, WITHOUT in printed


def only(folder: Path, pattern: str) -> Path:
    """Return the file of a pattern. Ends the program unless there is one for this Python."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = [
        path.resolve()
        for path in folder.glob(pattern)
        if path.suffix != ".whl" or re.search(rf"-{tag}-", path.name)
    ]
    if len(found) != 1:
        sys.exit(f"{folder} has {len(found)} files {pattern} for {tag}: run make wheel")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what `make wheel` has built")
    parser.add_argument("--torch", help="a requirement, such as torch==2.11.*")
    args = parser.parse_args()
    losses = {}
    for pattern, without in (("*.whl", False), ("*.tar.gz", True)):
        built = only(args.folder, pattern)
        with tempfile.TemporaryDirectory() as folder:
            found, is_without = losses_with(built, Path(folder), args.torch)
        print(f"{built.name}: losses {found}")
        if is_without != without:
            sys.exit(
                f"{built.name}: compiled parts are {'absent' if is_without else 'there'}"
            )
        losses[pattern] = found
    far = [a for a, b in zip(*losses.values(), strict=True) if abs(a - b) > TOLERANCE]
    if far or not all(losses.values()):
        sys.exit("the wheel and the source distribution train to different losses")
    print("both train without a compiler, to equal losses")


if __name__ == "__main__":
    main()
