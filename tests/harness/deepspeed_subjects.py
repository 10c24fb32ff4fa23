"""The programs of tests/deepspeed_scripts/subjects.py under DeepSpeed, and what they print there:

    python -m tests.harness.deepspeed_subjects tests/golden/deepspeed_programs.json

DeepSpeed 0.19.8 on the CPU, two ranks on gloo; a program that it fails has the error's class in the file.
"""

import importlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed_scripts.subjects import PROGRAMS, RANKS, STAGES, Run

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed_programs.json"


def cases() -> list[tuple[str, int]]:
    """(program, stage) of all that are run."""
    return [(name, stage) for name in PROGRAMS for stage in STAGES.get(name, range(4))]


def run_one(deepspeed: Any, name: str, stage: int, folder: Path, rank: int) -> dict:
    """{"numbers", "facts"} of a program on this rank."""
    numbers, facts = PROGRAMS[name](
        Run(deepspeed, stage, folder / name / str(stage), rank)
    )
    return {
        "numbers": [[float(f"{number:.7g}") for number in row] for row in numbers],
        "facts": facts,
    }


def record(rank: int, port: int, folder: Path, out: Path, names: list[str]) -> None:
    """All programs on one rank under DeepSpeed; rank 0 writes."""
    import deepspeed

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    found = {}
    for name, stage in cases():
        if names and name not in names:
            continue
        try:
            result = run_one(deepspeed, name, stage, folder, rank)
        except Exception as error:
            print(
                f"rank {rank}, {name} at stage {stage}: {error!r:.200}",
                file=sys.stderr,
                flush=True,
            )
            result = {"error": type(error).__name__}
        found[f"{name} {stage}"] = result
    if rank == 0:
        lines = [
            f"{json.dumps(name)}: {json.dumps(result)}"
            for name, result in found.items()
        ]
        out.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  once, before the ranks part

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: (
        None
    )  # it compiles for minutes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(RANKS):
            if not (pid := os.fork()):
                try:
                    record(rank, port, Path(folder), Path(sys.argv[1]), sys.argv[2:])
                except BaseException:
                    importlib.import_module("traceback").print_exc()
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
