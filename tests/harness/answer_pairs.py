"""Random pairs of answers in a corpus."""

import os

import numpy as np

from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.text.mask_file import LossMasks, MaskWriter


def write_pairs(
    prefix: str | os.PathLike, count: int, vocab: int, longest: int
) -> LossMasks:
    """A corpus of `count` pairs: prompts and answers of 2 to `longest` / 2 random tokens below `vocab`."""
    draw = np.random.default_rng(1)
    half = longest // 2
    with IndexedWriter(prefix, np.uint16) as writer, MaskWriter(prefix) as masks:
        for _ in range(count):
            prompt = draw.integers(0, vocab, draw.integers(2, half + 1))
            answers = [
                draw.integers(0, vocab, draw.integers(2, half + 1)) for _ in "ab"
            ]
            lengths = [len(prompt) + len(answer) for answer in answers]
            tokens = np.concatenate([prompt, answers[0], prompt, answers[1]])
            writer.add_documents(
                tokens.astype(np.uint16), np.array(lengths), np.array([2])
            )
            for answer in answers:
                learned = np.repeat([0, 1], [len(prompt), len(answer)])
                masks.add(learned.astype(np.uint8))
    return LossMasks(IndexedDataset(prefix))
