"""Whether programs written for DeepSpeed lose the same under this package: regenerates what the tests compare
with.

    python benchmarks/equal_to_deepspeed.py            # needs DeepSpeed; minutes; exit code 1 if not equal
    python benchmarks/equal_to_deepspeed.py --write    # and writes tests/golden/deepspeed_losses.json

The programs are those of tests/deepspeed_scripts, on two gloo ranks of this machine, once with `import
deepspeed` and once with `import megatron_ds as deepspeed`. Nothing else differs.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}

from tests.harness.deepspeed_scripts import (  # noqa: E402
    GOLDEN,
    RANKS,
    all_cases,
    differences,
    run_case,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write DeepSpeed's numbers into the golden file",
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--package", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.package:
        return run_rank(args.package, args.folder, args.only)
    theirs = run_job("deepspeed", args.only)
    if args.write:
        write(theirs)
    ours = run_job("megatron_ds", args.only)
    found = [
        line for name in theirs for line in differences(name, ours[name], theirs[name])
    ]
    print("\n".join(found) or f"{len(theirs)} cases are equal")
    return 1 if found else 0


def run_job(package: str, only: str) -> dict:
    """Name of a case → its records."""
    with tempfile.TemporaryDirectory() as folder:
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        command = [
            sys.executable,
            __file__,
            "--package",
            package,
            "--folder",
            folder,
            "--only",
            only,
        ]
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | address | {"RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=sys.stderr,
            )
            for r in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(f"{package}: exit codes {codes}")
        return json.loads((Path(folder) / "records.json").read_text())


def run_rank(package: str, folder: str, only: str) -> int:
    records = {}
    for number, (name, runs) in enumerate(all_cases().items()):
        if only in name:
            where = Path(folder) / str(number)
            where.mkdir(exist_ok=True)
            records[name] = run_case(package, runs, str(where))
        if os.environ["RANK"] == "0":
            (Path(folder) / "records.json").write_text(json.dumps(records))
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    return 0


def write(records: dict) -> None:
    kept = json.loads(GOLDEN.read_text())["cases"] if GOLDEN.exists() else {}
    about = {
        "command": "python benchmarks/equal_to_deepspeed.py --write",
        "versions": {
            name: version(name) for name in ("deepspeed", "torch", "transformers")
        }
        | {"python": platform.python_version()},
        "ranks": RANKS,
        "cases": {name: records.get(name, kept.get(name)) for name in all_cases()},
    }
    GOLDEN.write_text(json.dumps(about, indent=1) + "\n")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
