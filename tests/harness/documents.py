"""Code blocks of Markdown pages, and how each is tested.

An HTML comment directly above a block selects what is done with it:

    (none)                       run, in the order of the page, in one folder per page
    <!-- file: NAME -->          written to NAME in that folder, for later blocks
    <!-- needs GPUs -->          not run; the flags of its launches are parsed (`launches.py`)
    <!-- runs in: COMMAND -->    not run here; COMMAND, elsewhere in the tests, runs it
    <!-- printed -->             printed by earlier blocks; with `by: FILE`, by FILE in its test

This applies to blocks of ```bash and ```python, and to other languages only below a comment.
"""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.warm import warm_environment
from tools.free_port import free_port

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = re.compile(r"needs GPUs|file: \S+|runs in: .+|printed( by: \S+)?")
RUNNABLE = ("bash", "python")
COLD = ("docs/scale/planning.md",)
# What tests do in small, at a port of their own: patterns of a page, and what takes their place.
SMALLER = {
    "docs/start/tutorial.md": (
        (r"\btrain_iters: \d+", "train_iters: 4"),
        (r"\blr_warmup_iters: \d+", "lr_warmup_iters: 1"),
        (r"\beval_iters: [1-9]\d*", "eval_iters: 1"),
        # Documents that are measured, and conversations.
        (r"(?<!retry )\b90\b", "5"),
        (r"NR % 10 (.)= 0", r"NR < 40 && NR % 10 \1= 0"),
        (r"\b5050\b", str(free_port())),
    )
}
# Decimals with many digits: short ones are times or percentages, printed as the page has them.
FRACTION = re.compile(r"\d+\.\d{4,}")
ROUNDING = 5e-7


@dataclass(frozen=True)
class Block:
    """One fenced block. mark: the comment above it, "" without one."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and not self.mark

    @property
    def file(self) -> str:
        """The file to write the block to; "" for other blocks."""
        return (
            self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else ""
        )

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All pages for users, relative to the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["language"], found["text"], found["mark"] or "")


def environment() -> dict[str, str]:
    """Environment of the blocks: this Python first in PATH, one thread per rank, gloo on the loopback
    interface."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_"))
    }
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }


def link_sources(folder: Path) -> None:
    """Give `folder` the tools, examples and entry scripts of the repository root, so that blocks write only
    to `folder`."""
    for name in ("tools", "examples", "pretrain_gpt.py", "pretrain_bert.py"):
        (folder / name).symlink_to(ROOT / name)


def in_small(page: str, text: str) -> str:
    """Return a block of a page with the sizes and the port of tests."""
    for pattern, small in SMALLER.get(page, ()):
        text = re.sub(pattern, small, text)
    return text


def run_page(page: str, folder: Path, seconds: int = 200) -> str:
    """Run the page's blocks in `folder`; returns their output. Raises AssertionError with the output of a
    block that fails.

    Commands start warm (`warm.py`), except those of `COLD`, which check that pages also run without it.
    """
    link_sources(folder)
    where = environment() if page in COLD else warm_environment(environment())
    said = ""
    for block in blocks_of(page):
        if block.file:
            text = in_small(page, block.text)
            (folder / block.file).write_text(text, encoding="utf-8")
        elif block.runs:
            said += _run(block, folder, where, seconds)
        elif block.mark == "printed":
            check_printed(block, said)
    return said


def check_printed(block: Block, said: str) -> None:
    """Each line of the block, except blank ones, is a line of the output (`are_same_line`)."""
    there = [line.rstrip() for line in said.splitlines()]
    missing = [
        line
        for line in block.text.splitlines()
        if line.strip() and not any(are_same_line(line.rstrip(), own) for own in there)
    ]
    assert not missing, f"{block}: not printed: {missing}"


def are_same_line(expected: str, line: str) -> bool:
    """Whether two lines have the same words, and decimals within the rounding of fp32.

    Processors add in different orders, with and without AVX-512.
    """
    if FRACTION.sub("", expected) != FRACTION.sub("", line):
        return False
    pairs = zip(FRACTION.findall(expected), FRACTION.findall(line))
    return all(math.isclose(float(a), float(b), rel_tol=ROUNDING) for a, b in pairs)


def _run(block: Block, folder: Path, where: dict[str, str], seconds: int) -> str:
    text = in_small(block.page, block.text)
    if block.language == "python":
        text = f"exec python -c {shlex.quote(text)}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=where,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, (
        f"{block} ended with "
        f"{done.returncode}:\n{block.text}\n{done.stdout[-2000:]}\n"
        f"{done.stderr[-4000:]}"
    )
    return done.stdout + done.stderr
