"""`GPT_DATA`: the samples of a GPT, documents laid end to end and cut every s tokens, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...errors import DataError
from ..batch import Batch, document_numbers, document_positions
from ..kind import PAD, DataKind, Dataset, Sample
from ..text.indexed import IndexedDataset
from ..tokenizers import Tokenizer
from .gpt_dataset import MockDataset, open_gpt_dataset
from .packing import open_packed_dataset

if TYPE_CHECKING:
    from ...config import RunConfig


@dataclass(frozen=True)
class GPTCollator:
    """Batches of samples `{"tokens": int64 [s + 1]}`: inputs, and the inputs shifted by one as labels.

    Samples with "document_ids" [s + 1] are packed: positions and attention restart with each document, and
    the first token of the next document is not predicted from it.

    vocab_size            a larger id is a DataError: an embedding would fail far from the cause, or not at
                          all
    eod                   id of the end-of-document token, which belongs to the document that it ends
    eod_mask_loss         a position whose *input* is the end of a document does not count in the loss
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

    def __call__(self, samples: Sequence[Sample], indices: Sequence[int], sample_ids: tuple[int, ...],
                 training: bool) -> Batch:
        rows = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]))         # [b, s + 1]
        self._check(rows, indices)
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
            document_ids = document_numbers(ends)
        position_ids = torch.arange(self.seq_length).expand_as(tokens)
        if packed or self.reset_position_ids:
            position_ids = document_positions(document_ids)
        return Batch(
            tokens=tokens.clamp_(min=0), labels=labels.clamp_(min=0), loss_mask=loss_mask,
            position_ids=position_ids,
            document_ids=document_ids if packed or self.reset_attention_mask else None,
            sample_ids=sample_ids, training=training)

    def _check(self, rows: torch.Tensor, indices: Sequence[int]) -> None:
        if rows.shape[1] != self.seq_length + 1:
            raise DataError(f"the dataset has samples of {rows.shape[1]} tokens, and a sequence length of "
                            f"{self.seq_length} takes {self.seq_length + 1}, the last one as a label only.")
        low, high = torch.aminmax(rows)
        if PAD <= low and (self.vocab_size is None or high < self.vocab_size):
            return
        outside = rows < PAD if low < PAD else rows >= self.vocab_size
        row, column = outside.nonzero()[0].tolist()
        raise DataError(f"sample {indices[row]} holds token id {rows[row, column]}, outside the vocabulary "
                        f"of {self.vocab_size}: the corpus was made with another tokenizer. Give the flags "
                        "that tools/preprocess_data.py had, or preprocess the text again.")


def _mock(count: int, config: "RunConfig", tokenizer: Tokenizer, seed: int) -> MockDataset:
    return MockDataset(count, seq_length=config.model.seq_length, vocab_size=tokenizer.vocab_size,
                       eod=tokenizer.eod, seed=seed)


def _documents(corpus: IndexedDataset) -> range:
    """Each sequence is a document."""
    return range(len(corpus) + 1)


def _open(corpus: IndexedDataset, documents: range, *, title: str, num_samples: int | None,
          config: "RunConfig", tokenizer: Tokenizer) -> Dataset:
    open_dataset = open_packed_dataset if config.data.pack_documents else open_gpt_dataset
    return open_dataset(corpus, documents, title=title, seq_length=config.model.seq_length,
                        num_samples=num_samples, seed=config.train.seed, cache=config.data.data_cache_path)


def blank_batch(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    """A batch of token 0 in which all positions count in the loss."""
    tokens = torch.zeros(samples, positions, dtype=torch.int64, device=device)
    position_ids = torch.arange(positions, device=device).expand(samples, -1)
    return Batch(tokens, tokens, torch.ones(samples, positions, device=device), position_ids,
                 tuple(range(samples)))


def _collator(config: "RunConfig", tokenizer: Tokenizer) -> GPTCollator:
    data = config.data
    return GPTCollator(
        config.model.seq_length, tokenizer.vocab_size, tokenizer.eod, eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask)


GPT_DATA = DataKind(title="GPTDataset", tokens="tokens", documents=_documents, mock=_mock, open=_open,
                    collator=_collator, blank=blank_batch, fills=True,
                    identity=lambda config: {"pack_documents": True} if config.data.pack_documents else {})
