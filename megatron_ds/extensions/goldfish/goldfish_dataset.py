"""Goldfish loss: a token does not count if the hash of the last h tokens, itself included, is among the first 1 / k.

    dropped(t)   table[(x[t - h + 1] · … · x[t]) mod 1,000,003] < 1 / k

Hans et al. 2024 (arXiv:2406.10209), section 3.1, hashed masks. The product wraps in 64 bits, and the table has uniform
numbers of torch's generator with the seed of swiss-ai's fork of Megatron-LM: the same tokens are dropped as there.
The first h - 1 labels of a sample always count.
"""

from functools import cache

import numpy as np
import torch

from ...config import RunConfig
from ...data.kind import PAD, Dataset
from ...data.loading.datasets import Datasets
from ...data.tokenizers import Tokenizer

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073


@cache
def drop_table(k: int) -> np.ndarray:
    """Return whether each value of the hash is dropped, bool [TABLE_SIZE]."""
    random = torch.Generator().manual_seed(TABLE_SEED)
    return (torch.rand(TABLE_SIZE, generator=random) < 1 / k).numpy()


def dropped(labels: np.ndarray, k: int, h: int) -> np.ndarray:
    """Return whether each label does not count, bool [s]. labels: int64 [s]; padding is token 0."""
    known = np.where(labels == PAD, 0, labels)
    windows = np.lib.stride_tricks.sliding_window_view(known, h)
    hashes = windows.prod(axis=-1, dtype=np.int64) % TABLE_SIZE
    drops = np.zeros(len(labels), dtype=bool)
    drops[h - 1 :] = drop_table(k)[hashes]
    return drops


class GoldfishDataset:
    """A dataset of which some tokens do not count; a pure function of i, as the dataset is."""

    def __init__(self, dataset: Dataset, k: int, h: int):
        self.dataset = dataset
        self.k = k
        self.h = h

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        sample = dict(self.dataset[i])
        tokens = sample["tokens"]
        mask = sample.get("loss_mask", np.ones(len(tokens), np.float32)).copy()
        # The mask is of tokens, and a label is the token after its input.
        mask[1:][dropped(tokens[1:], self.k, self.h)] = 0
        return {**sample, "loss_mask": mask}


def forgetful(datasets: Datasets, config: RunConfig, tokenizer: Tokenizer) -> Datasets:
    """Return the datasets without the tokens that do not count, as in the fork also those of evaluations."""
    data = config.data
    return Datasets(
        *(
            None
            if dataset is None
            else GoldfishDataset(dataset, data.goldfish_k, data.goldfish_h)
            for dataset in datasets
        )
    )
