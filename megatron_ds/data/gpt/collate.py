"""From samples to a `Batch`: what each kind of dataset makes of its rows.

A collator is a function (samples, their numbers in the dataset, their places in the stream, training) → Batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import DataError
from ..batch import Batch
from ..documents import ids_of, positions_of

Sample = Mapping[str, np.ndarray]
Collator = Callable[[Sequence[Sample], Sequence[int], tuple[int, ...], bool], Batch]

PAD = -1                                                    # a dataset fills up short samples with it; never seen by a model


@dataclass(frozen=True)
class GPTCollator:
    """Batches of samples `{"tokens": int64 [s + 1]}`: inputs, and the same shifted by one as labels.

    Samples that bring "document_ids" [s + 1] are packed: positions and attention keep to each document, and what follows a
    document is not predicted from it.

    vocab_size            ids must be below it, else DataError: an embedding would fail far from the cause, or not at all
    eod                   id of the end-of-document token, which belongs to the document that it ends
    eod_mask_loss         a position whose *input* is the end of a document does not count
    reset_position_ids    positions count from the beginning of each document
    reset_attention_mask  a position attends to its own document only
    """

    seq_length: int
    vocab_size: int | None = None
    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self):
        needs_eod = self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        assert not needs_eod or self.eod is not None, "these options need the id of the end-of-document token"

    def __call__(self, samples: Sequence[Sample], numbers: Sequence[int], sample_ids: tuple[int, ...],
                 training: bool) -> Batch:
        rows = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]))         # [b, s + 1]
        self._check(rows, numbers)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()                # each [b, s]
        loss_mask = (labels != PAD).float()
        ends = None if self.eod is None else tokens == self.eod
        if self.eod_mask_loss:
            loss_mask[ends] = 0.0
        packed = "document_ids" in samples[0]
        if packed:
            ids = torch.from_numpy(np.stack([sample["document_ids"] for sample in samples]))
            loss_mask[ids[:, 1:] != ids[:, :-1]] = 0.0
            document_ids = ids[:, :-1].contiguous()
        elif self.reset_position_ids or self.reset_attention_mask:
            document_ids = ids_of(ends)
        restarts, apart = packed or self.reset_position_ids, packed or self.reset_attention_mask
        return Batch(
            tokens=tokens.clamp_(min=0), labels=labels.clamp_(min=0), loss_mask=loss_mask,
            position_ids=positions_of(document_ids) if restarts else torch.arange(self.seq_length).expand_as(tokens),
            document_ids=document_ids if apart else None, sample_ids=sample_ids, training=training)

    def _check(self, rows: torch.Tensor, numbers: Sequence[int]) -> None:
        if rows.shape[1] != self.seq_length + 1:
            raise DataError(f"the dataset gives samples of {rows.shape[1]} tokens where a sequence length of "
                            f"{self.seq_length} takes {self.seq_length + 1}, the last one being a label only.")
        low, high = torch.aminmax(rows)
        if PAD <= low and (self.vocab_size is None or high < self.vocab_size):
            return
        outside = rows < PAD if low < PAD else rows >= self.vocab_size
        row, column = outside.nonzero()[0].tolist()
        raise DataError(f"sample {numbers[row]} holds token id {rows[row, column]}, outside the vocabulary of "
                        f"{self.vocab_size}: the corpus was made with another tokenizer than the one given. "
                        "Give the flags that tools/preprocess_data.py had, or preprocess the text again.")
