"""Train a tiny run in processes of its own, and read its losses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from .tiny import STEPS, Tiny

SECONDS = 300  # after which a run counts as stuck
LAST_LINES = 6  # of the output of a run that fails


def losses_of(tiny: Tiny, folder: Path) -> list[dict]:
    """Return the records of the steps of a tiny run. Raises ConfigError if it does not make STEPS steps.

    folder: for its configuration and its metrics. Processes use CPUs alone.
    """
    # The run is a command of its own, under torchrun for several processes.
    config = folder / "tiny.yaml"
    metrics = folder / "metrics.jsonl"
    config.write_text(tiny.text, encoding="utf-8")
    launcher: Sequence[str] = ()
    if tiny.ranks > 1:
        launcher = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(tiny.ranks),
        )
    training = (
        "-m",
        "megatron_ds",
        "train",
        "--config",
        str(config),
        "--metrics-jsonl",
        str(metrics),
    )
    words = [sys.executable, *launcher, *training]
    # Processes share the cores of the machine and use no GPU.
    threads = max(1, (os.cpu_count() or 1) // tiny.ranks)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    output = _run(words, env)
    # The metrics are complete only if all steps were made.
    found = (
        [json.loads(line) for line in metrics.read_text().splitlines()]
        if metrics.is_file()
        else []
    )
    records = [record for record in found if record.get("kind") == "train"]
    if len(records) < STEPS:
        last = "\n".join(output.strip().splitlines()[-LAST_LINES:])
        raise ConfigError(
            f"the tiny run made {len(records)} of {STEPS} steps. It ended with:\n{last}"
        )
    return records


def _run(words: Sequence[str], env: dict[str, str]) -> str:
    """Return the output of a command, whose processes are ended with it."""
    with subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the tiny run did not end within {SECONDS} s.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
