"""What a GPU does besides training steps: a save in the background, pairs of answers, generated texts.

Each function runs on a device and returns what must be the same on another one. `tests/gpu/test_new_features.py`
compares a GPU with the CPU; `tests/kernels/test_gpu_features.py` runs them on a GPU that does not exist. Adapters are
cases of gpu_equality.py.
"""

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from megatron_ds.config import RunConfig, parse
from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.extensions.preference.answer_pairs import PREFERENCE_DATA
from megatron_ds.extensions.preference.first_model import score_pairs
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import kernel_table
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import Replica, build_replica
from megatron_ds.training.saves import Saves
from megatron_ds.training.step import train_step
from tests.harness.answer_pairs import write_pairs
from tests.harness.layout_comparison import (
    Trace,
    merge,
    open_loader,
    random_samples,
    train_layout,
)
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

STEPS = 3
SAVED = 2  # the step behind which a save begins
BATCH = 2
PAIRS = 6
NEW_TOKENS = 5
PROMPTS = ((1, 2, 3), (4, 5, 6, 7, 8), (9, 10))  # of unlike lengths, more than seats
SEATS = 2


def job(style: str, dtype: str, *more: str) -> list[str]:
    """Flags of two layers without dropout."""
    flags = tiny_job(style, dtype, False, 0.0, 2, BATCH, STEPS)
    return [*flags, "--micro-batch-size", "1", *more]


def mesh_of(device: torch.device) -> Mesh:
    """A mesh of one rank."""
    return Mesh(Grid.fit(1), 0, lambda *_: None, device)


def saved_files(
    device: torch.device, folder: Path, *more: str, in_background: bool
) -> dict[str, str]:
    """SHA-256 of the tensors' files of step SAVED. In the background, a step is trained while it is written."""
    way = ["--async-save"] if in_background else []
    flags = job("llama", "bf16", "--save", str(folder), *way, *more)
    config = parse(flags, world_size=1)
    with kernel_table.selected("auto"):
        replica = build_replica(config, mesh_of(device))
        saves = Saves(replica, {}, None)
        _train(replica, config, lambda progress: _save(saves, progress))
        saves.finish()
    files = sorted((folder / f"iter_{SAVED:07d}").glob("*.distcp"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _save(saves: Saves, progress: Progress) -> None:
    if progress.step == SAVED:
        saves.save(progress)


def _train(
    replica: Replica, config: RunConfig, after_step: Callable[[Progress], None]
) -> None:
    progress = Progress()
    samples = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1)
    with closing(open_loader(config, samples, replica.mesh)) as loader:
        for _ in range(STEPS):
            batch = replica.batches.training(loader, progress, BATCH)
            train_step(replica, batch, progress, learning_rate=1e-3, weight_decay=0.1)
            progress = progress.after(BATCH, BATCH * SEQ_LENGTH)
            after_step(progress)


def trained_on_pairs(
    device: torch.device, folder: Path, *more: str
) -> tuple[tuple[Trace, dict], list]:
    """((trace, weights), log-probabilities under the reference) of a run with --dpo."""
    prefix = folder / "pairs"
    write_pairs(prefix, PAIRS, VOCAB - 1, SEQ_LENGTH // 2)
    flags = tiny_job("llama", "fp32", True, 0.0, 2, BATCH, 20, samples="packed")
    flags.remove("--pack-documents")
    flags.remove("--eod-mask-loss")
    flags += ["--micro-batch-size", "1", "--dpo", "--dpo-beta", "2"]
    config = parse([*flags, *more], world_size=1)
    pairs = PREFERENCE_DATA.open(
        IndexedDataset(prefix),
        range(PAIRS),
        title="",
        num_samples=100,
        config=config,
        tokenizer=None,
    )
    collate = PREFERENCE_DATA.collator(config, NullTokenizer(VOCAB - 1))

    def fill(replica: Replica) -> None:
        pairs.reference = score_pairs(
            replica, pairs, np.arange(len(pairs.pairs)), collate
        )

    with kernel_table.selected("auto"):
        trace = train_layout(config, mesh_of(device), STEPS, pairs, watch=fill)
    return merge([trace]), pairs.reference.tolist()


def generated(device: torch.device, *more: str) -> dict[int, list]:
    """Request → its tokens and their log-probabilities, chosen greedily. A seat is taken again when a text ends."""
    config = parse(job("llama", "fp32", *more), world_size=1)
    with kernel_table.selected("auto"):
        generator = Generator(build_replica(config, mesh_of(device)), requests=SEATS)
        greedy = Sampling(temperature=0.0)
        texts = {}
        for i, prompt in enumerate(PROMPTS):
            request = GenerationRequest(prompt, greedy, NEW_TOKENS + i, alternatives=0)
            texts[generator.add(request)] = []
        while not generator.is_idle:
            for number, token in generator.step():
                texts[number].append(token)
    return texts
