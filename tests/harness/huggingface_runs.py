"""Runs of tests/deepspeed_scripts/huggingface.py, and the losses that DeepSpeed has in them.

DS_ACCELERATOR=cpu python -m tests.harness.huggingface_runs     # needs DeepSpeed; writes GOLDEN
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.harness.limits import HUNG

from .warm import warm_environment

PROGRAM = Path(__file__).parents[1] / "deepspeed_scripts" / "huggingface.py"
GOLDEN = Path(__file__).parents[1] / "golden" / "trainer_losses.json"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TQDM_DISABLE": "1",
}
RANKS = 2

Case = tuple[str, dict[str, Any]]


def trained(**options: Any) -> Case:
    """A case of the Trainer."""
    return "trained", options


def looped(**options: Any) -> Case:
    """A case of the loop with accelerate."""
    return "looped", options


JSON_SCHEDULER = {"warmup": 2, "json_options": {"scheduler": True}}
# Those that DeepSpeed runs too, on CPUs. Kinds: the name without the stage.
CASES = {
    f"{stage} {kind}": make(stage=stage, **options)
    for stage in (2, 3)
    for kind, make, options in (
        ("plain", trained, {}),
        ("bf16", trained, {"bf16": True}),
        ("accumulated", trained, {"accumulation": 2}),
        ("scheduled", trained, JSON_SCHEDULER),
        ("lora", trained, {"lora": True, "save": True}),
        ("loop", looped, {}),
        ("loop accumulated", looped, {"accumulation": 2}),
        ("loop lora", looped, {"accumulation": 2, "lora": True}),
    )
}


def run(
    package: str, cases: dict[str, Case], folder: Path, timeout: float = 280
) -> dict[str, list[float]]:
    """Losses of each case under "megatron_ds", "deepspeed", or in one process without either, "none"."""
    start = (
        ["python"]
        if package == "none"
        else ["torchrun", "--nproc-per-node", str(RANKS)]
    )
    environment = {**os.environ, **QUIET}
    if package != "deepspeed":
        environment = warm_environment(environment)
    done = subprocess.run(
        [*start, str(PROGRAM), package, str(folder), json.dumps(cases)],
        text=True,
        capture_output=True,
        cwd=folder,
        env=environment,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())


def write() -> None:
    """Write DeepSpeed's losses."""
    with tempfile.TemporaryDirectory() as folder:
        losses = run("deepspeed", CASES, Path(folder), timeout=10 * HUNG)
    packages = ("deepspeed", "torch", "transformers", "accelerate", "peft")
    about = {
        "command": "DS_ACCELERATOR=cpu python -m tests.harness.huggingface_runs",
        "ranks": RANKS,
        "versions": {name: version(name) for name in packages},
        "losses": losses,
    }
    GOLDEN.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write())
