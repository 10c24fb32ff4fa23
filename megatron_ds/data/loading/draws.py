"""What a run draws from each corpus, as a table: samples, share, and how many times the corpus is read.

    train data                           share asked      samples   share drawn     epochs
      web_text_document                       70.00%          700        70.00%       0.31
      books_text_document                     30.00%          300        30.00%       4.20
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COUNTED_AT_ONCE = 1 << 22
MOST_ROWS = 24


@dataclass(frozen=True)
class Draw:
    """Of one corpus. share: asked for, None without weights; tokens: of the corpus in this part."""

    name: str
    share: float | None
    samples: int
    tokens: int


def count_draws(dataset_index: np.ndarray, num_datasets: int) -> np.ndarray:
    """Samples drawn from each dataset; int64 [num_datasets]. In pieces: bincount makes int64 of what it is given."""
    counts = np.zeros(num_datasets, np.int64)
    for first in range(0, len(dataset_index), COUNTED_AT_ONCE):
        counts += np.bincount(dataset_index[first:first + COUNTED_AT_ONCE], minlength=num_datasets)
    return counts


def draws_text(part: str, draws: Sequence[Draw], seq_length: int) -> str:
    """The table. Of many corpora, those that are read most often: of these one wants to know."""
    total = max(1, sum(draw.samples for draw in draws))
    epochs = {draw: draw.samples * seq_length / max(1, draw.tokens) for draw in draws}
    shown = draws if len(draws) <= MOST_ROWS else sorted(draws, key=epochs.__getitem__, reverse=True)[:MOST_ROWS]
    width = max(24, *(len(draw.name) for draw in shown))
    rows = [f"{part + ' data':<{width + 2}} share asked      samples  share drawn   epochs"]
    for draw in shown:
        asked = "" if draw.share is None else f"{draw.share:.2%}"
        rows.append(f"  {draw.name:<{width}} {asked:>11} {draw.samples:>12,} {draw.samples / total:>12.2%} "
                    f"{epochs[draw]:>8.2f}")
    if len(shown) < len(draws):
        rows.append(f"  … of {len(draws)} corpora, the {len(shown)} that are read most often")
    return "\n".join(rows)
