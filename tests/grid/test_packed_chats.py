"""Conversations that share rows train as each does in a row of its own, at any layout."""

import functools

import numpy as np
import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.samples.packing import PackedDataset, Packs
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.text.mask_file import LossMasks, MaskWriter
from megatron_ds.mpu.mesh import Mesh
from tests.harness.layout_comparison import merge, parse_layout, train_layout
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

# Tokens of the conversations of each row; some rows have room left.
ROWS = ((9, 8, 8), (25,), (3, 11, 4, 6), (13, 7))
SGD = (
    "--optimizer sgd --sgd-momentum 0 --lr 1 --min-lr 1 --lr-decay-style constant --lr-warmup-iters 0 "
    "--weight-decay 0 --clip-grad 0 --sft --tokenizer-type NullTokenizer"
).split()
LEFT_OUT = ("--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Masks and corpus of random conversations, of which each has other answers; one has a single token."""
    prefix = tmp_path_factory.mktemp("chats") / "c"
    draw = np.random.default_rng(1)
    lengths = [length for row in ROWS for length in row]
    with IndexedWriter(prefix, np.uint16) as writer, MaskWriter(prefix) as masks:
        for number, length in enumerate(lengths):
            writer.add_document(draw.integers(0, VOCAB - 1, length))
            mask = (draw.random(length) < (number + 1) / len(lengths)).astype(np.uint8)
            mask[-1] = 1
            masks.add(mask)
    return LossMasks(IndexedDataset(prefix))


def rows_of(chats: LossMasks, counts) -> PackedDataset:
    """The conversations in rows of these counts, in their order."""
    number = len(chats.corpus)
    packs = Packs(
        document=np.arange(number),
        start=np.zeros(number, np.int64),
        length=chats.corpus.lengths.astype(np.int64),
        members=np.arange(number),
        bounds=np.cumsum([0, *counts]),
    )
    return PackedDataset(chats.corpus, packs, SEQ_LENGTH, None, 1, chats)


def flags(style: str, rows: int) -> list[str]:
    """The tiny job, updated by plain gradient descent: a step of rate 1 subtracts the gradient."""
    job = tiny_job(style, "fp32", True, 0.0, 2, rows, 2, samples="packed")
    job.remove("--eod-mask-loss")
    return [*job, *SGD]


def step(style: str, dataset: PackedDataset, layout: str, steps: int = 1):
    """(loss, weights) after a step over all rows."""
    request = parse_layout(layout, mbs="1")
    job = [*flags(style, len(dataset)), *request.flags]
    config = parse(job, world_size=request.world_size)
    grid = config.grid(request.world_size)

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return train_layout(config, mesh, steps, dataset)

    trace, weights = merge(run_ranks(request.world_size, main))
    return trace.losses, weights


@functools.cache
def alone(style: str, chats: LossMasks):
    """(loss, gradients) of one conversation a row, in one process."""
    dataset = rows_of(chats, [1] * len(chats.corpus))
    start = step(style, dataset, "", steps=0)[1]
    losses, weights = step(style, dataset, "")
    return losses[0], {name: start[name] - weights[name] for name in start}, start


@pytest.mark.parametrize(
    "style, layout",
    [
        ("llama", "dp=1"),
        ("gpt2", "tp=2,sp=1"),
        ("llama", "pp=2,dp=2,zero=2"),
        ("llama", "cp=2,tp=2"),
        ("gpt2", "cp=2,dp=2,zero=3"),
        ("llama", "mbs=2,dp=2,zero=1"),
    ],
)
def test_conversations_that_share_rows_have_the_gradients_of_each_alone(
    chats, style, layout
):
    loss, gradients, start = alone(style, chats)
    packed = rows_of(chats, [len(row) for row in ROWS])
    losses, weights = step(style, packed, layout)
    assert losses[0] == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        found = start[name] - weights[name]
        # Weights near 1 keep 1e-7 of a gradient.
        apart = (found - gradient).norm() / max(float(gradient.norm()), 1e-2)
        assert apart < 1e-5, name


def test_the_loss_is_the_mean_over_the_answers_of_all_rows(chats):
    """Rows have from one to some twenty tokens to learn, so the mean of their means is another number."""
    dataset = rows_of(chats, [1] * len(chats.corpus))
    by_row = []
    for number in range(len(chats.corpus)):
        one = rows_of(chats, [1] * len(chats.corpus))
        one.packs = one.packs._replace(
            members=np.array([number]), bounds=np.array([0, 1])
        )
        one.per_epoch = one.num_samples = 1
        by_row.append(step("llama", one, "")[0][0])
    # The first token of a conversation is not predicted.
    learned = np.array([chats.get(i)[1:].sum() for i in range(len(chats.corpus))])
    mean = float(np.dot(by_row, learned) / learned.sum())
    assert step("llama", dataset, "")[0][0] == pytest.approx(mean, rel=1e-6)
    assert np.mean(by_row) != pytest.approx(mean, rel=1e-4)
