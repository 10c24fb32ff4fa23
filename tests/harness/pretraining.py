"""`pretrain_gpt.py` on real ranks: the pooled processes, with the environment that torchrun would set.

    ended = run_pretrain(2, [*TINY, "--save", folder],
                         spoil=partial(signal_at_step, number=SIGTERM, step=3, victim=1))

`spoil(rank)` is a context manager, importable by name, that is active on each rank while it trains; see
`spoilers`.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.harness.limits import HUNG
from tests.harness.processes import run_processes
from tools.free_port import free_port

VOCAB, SEQ_LENGTH, GLOBAL_BATCH, STEPS = 61, 16, 4, 6
TINY = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ_LENGTH} "
    f"--max-position-embeddings {SEQ_LENGTH} --vocab-size {VOCAB} "
    "--make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --micro-batch-size 1 "
    f"--global-batch-size {GLOBAL_BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --hidden-dropout 0.1 --attention-dropout 0.1 --eval-iters 0 "
    "--log-interval 1 --distributed-timeout-minutes 8"
).split()
MOCK = [*TINY, "--mock-data", "--train-iters", str(STEPS)]


@dataclass
class Ended:
    """How a rank ended, and what it said."""

    code: int
    out: str
    err: str


def run_pretrain(
    ranks: int,
    argv: Sequence[str],
    *,
    spoil=None,
    timeout: float = HUNG,
    command: str = "train",
) -> list[Ended]:
    """Every rank's end, in rank order. A rank that dies or raises fails the call."""
    return run_processes(
        ranks,
        _rank,
        free_port(),
        [str(word) for word in argv],
        spoil,
        command,
        timeout=timeout,
        joined=False,
    )


def train(ranks: int, argv: Sequence[str], **options) -> list[Ended]:
    """`run_pretrain`, where every rank must end well."""
    ended = run_pretrain(ranks, argv, **options)
    assert [e.code for e in ended] == [0] * ranks, "\n".join(
        e.out[-2000:] + e.err for e in ended
    )
    return ended


def _rank(rank, world, port, argv, spoil, command="train") -> Ended:
    from megatron_ds.cli import main_guard
    from megatron_ds.extensions.evaluation import evaluate
    from megatron_ds.extensions.serving import serve
    from megatron_ds.training.pretrain import pretrain

    programs = {
        "train": pretrain,
        "evaluate": lambda argv: main_guard(lambda: evaluate.run_tool(argv)),
        "serve": lambda argv: main_guard(lambda: serve.run_tool(argv)),
    }

    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    values = (rank, world.size, rank, world.size, "127.0.0.1", port)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in zip(names, values):
            if world.size > 1:
                environment.setenv(name, str(value))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        if spoil is not None:
            stack.enter_context(spoil(rank))
        code = programs[command](argv)
    return Ended(code, out.getvalue(), err.getvalue())


# What a run left behind.


def records(folder, kind: str = "train") -> list[dict]:
    """The records of metrics.jsonl, in order of steps; of a repeated step the last one in the file."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    last = {
        record["step"]: record
        for record in map(json.loads, lines)
        if record["kind"] == kind
    }
    return [last[step] for step in sorted(last)]


def losses(folder) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder)}


def run_file(folder, step: int) -> dict:
    return json.loads((Path(folder) / f"iter_{step:07d}" / "run.json").read_text())


def saved_state(folder, step: int) -> dict[str, torch.Tensor]:
    """Every logical tensor of a checkpoint, read by torch's own loader."""
    import torch.distributed.checkpoint as dcp

    path = Path(folder) / f"iter_{step:07d}"
    index = dcp.FileSystemReader(path).read_metadata()
    state = {
        name: torch.empty(entry.size)
        for name, entry in index.state_dict_metadata.items()
    }
    # that there is one process, which is meant
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
