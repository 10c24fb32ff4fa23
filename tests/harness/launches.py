"""What a shell script starts, without starting it: the script runs with launchers that only write down their
words.

So loops, variables and arrays of a recipe are the shell's own affair, and what is checked is what the ranks
would be given.
"""

import json
import os
import re
import stat
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config import RunConfig, parse
from megatron_ds.planning.run_plan import RULES
from megatron_ds.training.pretrain import KNOWN_NAMES
from tests.harness.documents import ROOT, environment
from tests.harness.limits import HUNG

SCRIPTS = {
    "pretrain_gpt.py": {},
    "pretrain_bert.py": {"model": "bert"},
}  # and what each prefers
STAND_INS = ("torchrun", "srun", "scontrol", "sbatch")
STAND_IN = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


@dataclass(frozen=True)
class Started:
    """One command that a script gave to a launcher. words: those of the training script, which is named by
    itself."""

    launcher: str
    world_size: int
    script: str
    words: tuple[str, ...]

    def config(self) -> RunConfig:
        """What the ranks would make of it. Raises ConfigError as they would, before any process group."""
        return parse(
            list(self.words),
            world_size=self.world_size,
            known=KNOWN_NAMES,
            rules=RULES,
            defaults=SCRIPTS[self.script],
        )


def started_by(
    script: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> list[list[str]]:
    """Run the text `script` in `folder`; every command that it gave to a launcher, word by word."""
    log, stand_ins = folder / "started.jsonl", folder / "stand-ins"
    stand_ins.mkdir()
    for name in STAND_INS:
        path = stand_ins / name
        path.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    base = environment()
    whole = {
        **base,
        **sbatch_environment(script),
        **(env or {}),
        "PATH": f"{stand_ins}{os.pathsep}{base['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script, "recipe", *arguments],
        cwd=folder,
        env=whole,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return (
        [json.loads(line) for line in log.read_text().splitlines()]
        if log.exists()
        else []
    )


def trainings(
    commands: list[list[str]], slurm: Mapping[str, str] | None = None
) -> list[Started]:
    """Return those of the commands that train, with the number of ranks that their launcher would start."""
    return [
        _started(words, slurm or {})
        for words in commands
        if any(map(_script_of, words))
    ]


def sbatch_environment(script: str) -> dict[str, str]:
    """What Slurm would put into the environment of a job with the script's #SBATCH lines; empty without
    any."""
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    if "nodes" not in options:
        return {}
    nodes, tasks = int(options["nodes"]), int(options.get("ntasks-per-node", 1))
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
    }


def _script_of(word: str) -> str | None:
    return next((script for script in SCRIPTS if word.endswith(script)), None)


def _started(words: list[str], slurm: Mapping[str, str]) -> Started:
    launcher, *rest = words
    at = next(i for i, word in enumerate(rest) if _script_of(word))
    world_size = {"torchrun": _torchrun, "srun": _srun}[launcher](rest[: at + 1], slurm)
    return Started(launcher, world_size, _script_of(rest[at]), tuple(rest[at + 1 :]))


def _torchrun(words: list[str], slurm) -> int:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(
        words
    )  # exits when the torchrun at hand does not know a flag
    return int(str(args.nnodes).partition(":")[0]) * int(args.nproc_per_node)


def _srun(words: list[str], slurm) -> int:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nodes", "-N", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int)
    known, _ = parser.parse_known_args(words)
    return (
        known.nodes * known.ntasks_per_node
        if known.ntasks_per_node
        else int(slurm["SLURM_NTASKS"])
    )
