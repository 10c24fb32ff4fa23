"""`Loader`: from samples of a dataset to the `Batch` of one data-parallel rank.

Stateless: `batch(consumed, ...)` is a pure function of its arguments. With `num_workers` threads the next batches are read
ahead; asking for another one than was foreseen (after a resume, or when the batch size changes) only costs the wait.
"""

from collections.abc import Callable, Sized
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ..errors import DataError
from .batch import Batch
from .sampler import ORDERS, local_positions

PAD = -1                                                    # a dataset fills up short samples with it; never seen by a model


class Loader:
    """Makes batches of `dataset`, a sized thing whose `[i]` is `{"tokens": int64 [s + 1]}`.

    eod              id of the end-of-document token; with eod_mask_loss a position whose *input* is it does not count
    vocab_size       ids must be below it, else DataError: an embedding would fail far from the cause, or not at all
    dataloader_type  which sample stands at a position of the stream: a name in `sampler.ORDERS`
    collate          (samples, places in the stream, training) -> Batch, for samples that are something else; see `DataKind`
    num_workers      batches read ahead, each by a thread (numpy lets go of the interpreter while it copies)
    """

    def __init__(self, dataset: Sized, *, seq_length: int, micro_batch_size: int, eod: int | None = None,
                 eod_mask_loss: bool = False, vocab_size: int | None = None, dataloader_type: str = "single",
                 num_workers: int = 0, collate: Callable[..., Batch] | None = None):
        assert not eod_mask_loss or eod is not None, "eod_mask_loss needs the id of the end-of-document token"
        self.dataset, self.seq_length, self.micro_batch_size = dataset, seq_length, micro_batch_size
        self._order = ORDERS[dataloader_type]
        self._masked_token = eod if eod_mask_loss else None
        self._vocab_size, self._collate = vocab_size, collate
        self._pool = ThreadPoolExecutor(num_workers, "loader") if num_workers else None
        self._ahead: dict[tuple, Future[Batch]] = {}
        self._depth = num_workers

    def batch(self, consumed: int, global_batch: int, dp_rank: int = 0, dp_size: int = 1, *,
              training: bool = True) -> Batch:
        """This rank's [G / dp, s] of the global batch that follows `consumed` samples; `Batch.split` cuts micro-batches.

        Row order is micro-batch by micro-batch; `sample_ids` are positions in the stream, the same under every layout.
        Raises DataError when the data ends, ConfigError when the sizes do not divide.
        """
        if self._pool is None:
            return self._make(consumed, global_batch, dp_rank, dp_size, training)
        wanted = [(consumed + i * global_batch, global_batch, dp_rank, dp_size, training) for i in range(self._depth + 1)]
        known = {key: self._ahead.pop(key, None) or self._pool.submit(self._make, *key) for key in wanted}
        for forgotten in self._ahead.values():
            forgotten.cancel()
        self._ahead = known
        return known.pop(wanted[0]).result()

    def close(self) -> None:
        """End the threads. Only for tidiness: they do not keep a process alive for longer than a batch takes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _make(self, consumed: int, global_batch: int, dp_rank: int, dp_size: int, training: bool) -> Batch:
        positions = local_positions(consumed, global_batch, self.micro_batch_size, dp_rank, dp_size)
        samples = self._order(np.array(positions, np.int64), len(self.dataset)).tolist()
        if self._collate is not None:
            return self._collate([self.dataset[i] for i in samples], positions, training=training)
        rows = torch.from_numpy(np.stack([self.dataset[i]["tokens"] for i in samples]))     # [b, s + 1]
        self._check(rows, samples)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()                # each [b, s]
        loss_mask = (labels != PAD).float()
        if self._masked_token is not None:
            loss_mask[tokens == self._masked_token] = 0.0
        return Batch(
            tokens=tokens.clamp_(min=0), labels=labels.clamp_(min=0), loss_mask=loss_mask,
            position_ids=torch.arange(self.seq_length).expand_as(tokens), sample_ids=tuple(positions), training=training)

    def _check(self, rows: torch.Tensor, samples: list[int]) -> None:
        if rows.shape[1] != self.seq_length + 1:
            raise DataError(f"the dataset gives samples of {rows.shape[1]} tokens where a sequence length of "
                            f"{self.seq_length} takes {self.seq_length + 1}, the last one being a label only.")
        low, high = torch.aminmax(rows)
        if PAD <= low and (self._vocab_size is None or high < self._vocab_size):
            return
        outside = rows < PAD if low < PAD else rows >= self._vocab_size
        row, column = outside.nonzero()[0].tolist()
        raise DataError(f"sample {samples[row]} holds token id {rows[row, column]}, outside the vocabulary of "
                        f"{self._vocab_size}: the corpus was made with another tokenizer than --tokenizer-type and its "
                        "files say. Give the flags that tools/preprocess_data.py had, or preprocess the text again.")
