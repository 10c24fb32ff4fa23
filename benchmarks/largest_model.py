"""A model whose training state is several times the memory that a process may use: without and with
offloading to a disk.

    python benchmarks/largest_model.py --limit-mib 1700 --nvme-path /var/tmp

The process runs in a memory control group of its own (Linux, as root; page cache counts, too). It must be
killed when nothing is offloaded, and train when masters, moments and weights are. `--limit-mib 0` measures
without a limit.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE_BYTES = (
    16  # of a parameter: 16-bit weights and gradients, fp32 master and two moments
)


@contextmanager
def memory_group(limit_mib: int):
    """Yields (folder of a control group, file of its limit); None where no limit is asked for."""
    if not limit_mib:
        yield None
        return
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(parent) / f"largest_model_{os.getpid()}"
        if (Path(parent) / "cgroup.procs").exists():
            try:
                folder.mkdir()
                (folder / limit).write_text(str(limit_mib << 20))
                break
            except OSError as error:
                raise SystemExit(
                    f"cannot make a memory control group in {parent}: {error.strerror}. Run as "
                    "root on Linux, or use --limit-mib 0."
                ) from None
    else:
        raise SystemExit(
            "no memory control groups here. Run as root on Linux, or use --limit-mib 0."
        )
    try:
        yield folder
    finally:
        time.sleep(0.5)
        folder.rmdir()


def train(flags: list[str], group: Path | None, steps: int) -> dict:
    """What became of it: exit code, peak memory of the process, seconds a step, loss, and the line about
    state.
    """
    with tempfile.TemporaryDirectory() as work:
        metrics = Path(work) / "metrics.jsonl"
        command = [
            sys.executable,
            str(ROOT / "pretrain_gpt.py"),
            *flags,
            "--train-iters",
            str(steps),
            "--metrics-jsonl",
            str(metrics),
        ]

        def enter() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        with open(Path(work) / "log", "w+") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=enter,
                cwd=work,
            )
            _, status, usage = os.wait4(process.pid, 0)
            log.seek(0)
            said = log.read()
        rows = (
            [json.loads(line) for line in metrics.read_text().splitlines()]
            if metrics.exists()
            else []
        )
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    seconds = [row["step_seconds"] for row in rows if row["kind"] == "train"]
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "peak_mib": usage.ru_maxrss >> 10,
        "losses": losses,
        "s_step": sorted(seconds)[len(seconds) // 2] if seconds else None,
        "said": said,
        "state": (re.search(r"ZeRO stage.*", said) or [""])[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-mib", type=int, default=1700)
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    # The model, and its parameters by the formula of a GPT.
    h = args.hidden
    vocab = 8192
    parameters = args.layers * (12 * h * h + 13 * h) + (vocab + args.seq + 2) * h
    # The run, and what it adds to put the state on a disk.
    flags = [
        "--num-layers",
        args.layers,
        "--hidden-size",
        h,
        "--num-attention-heads",
        h // 64,
        "--seq-length",
        args.seq,
        "--vocab-size",
        vocab,
        "--mock-data",
        "--micro-batch-size",
        1,
        "--global-batch-size",
        1,
        "--lr",
        "1e-4",
        "--bf16",
        "--main-grads-dtype",
        "bf16",
        "--log-interval",
        1,
        "--eval-iters",
        0,
        "--recompute-granularity",
        "full",
        "--zero-stage",
        3,
        "--hidden-dropout",
        0,
        "--attention-dropout",
        0,
    ]
    flags = [str(flag) for flag in flags]
    away = [
        "--offload-optimizer",
        "nvme",
        "--offload-param",
        "nvme",
        "--offload-nvme-path",
        args.nvme_path,
        "--sub-group-size",
        str(2**21),
    ]
    # Both runs under the same limit of memory.
    state = parameters * STATE_BYTES / 2**20
    print(f"{parameters:,} parameters, {state:,.0f} MiB of state", end="")
    print(
        f" = {state / args.limit_mib:.2f} times the limit of {args.limit_mib} MiB"
        if args.limit_mib
        else ", no limit"
    )
    for name, extra in (("nothing offloaded", []), ("everything to a disk", away)):
        with memory_group(args.limit_mib) as group:
            result = train(flags + extra, group, args.steps)
        ended = (
            "trained"
            if result["exit"] == 0
            else f"ended with exit code {result['exit']}"
        )
        print(
            f"{name}: {ended}, peak {result['peak_mib']} MiB, {result['s_step']} s/step, losses "
            f"{result['losses']}"
        )
        print(f"    {result['state'] or result['said'][-300:]}", flush=True)


if __name__ == "__main__":
    main()
