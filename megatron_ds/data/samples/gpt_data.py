"""`GPT_DATA`: samples of s + 1 tokens, of a corpus (gpt_corpus.py) or without one, and their batches.

`dataset[i]` is `{"tokens": int64 [s + 1]}`, a pure function of (corpus, documents, seq_length, num_samples,
seed, i).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...batch.batch import Batch
from ...batch.documents import document_numbers, document_positions
from ...errors import DataError
from ..kind import PAD, DataKind, Dataset, Sample
from ..tokenizers import Tokenizer

if TYPE_CHECKING:
    from ...config import RunConfig


class MockDataset:
    """Samples to try a layout or measure speed without a corpus. Predictable, so that the loss falls.

    Sample i counts upwards in steps of 1 to 4 from a random id, and restarts after an end of document. A pure
    function of (seed, i). Ids are in [0, vocab_size).
    """

    def __init__(
        self, num_samples: int, *, seq_length: int, vocab_size: int, eod: int, seed: int
    ):
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.eod = eod
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((self.seed, i))
        end = int(random.integers(1, self.seq_length + 1))
        starts = random.integers(0, self.vocab_size, 2)
        steps = random.integers(1, 5, 2)
        places = np.arange(self.seq_length + 1, dtype=np.int64)
        tokens = np.where(
            places < end,
            starts[0] + steps[0] * places,
            starts[1] + steps[1] * (places - end),
        )
        tokens %= self.vocab_size
        tokens[end] = self.eod
        return {"tokens": tokens}


@dataclass(frozen=True)
class GPTCollator:
    """Batches of samples `{"tokens": int64 [s + 1]}`: inputs, and the inputs shifted by one as labels.

    Samples with "document_ids" [s + 1] are packed: positions and attention restart with each document, and
    the first token of the next document is not predicted from it. "loss_mask" [s + 1] has 1 for the tokens
    whose prediction counts, as answers of conversations.

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
        needs_eod = (
            self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        )
        assert not needs_eod or self.eod is not None, (
            "these options need the id of the end-of-document token"
        )

    def __call__(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        sample_ids: tuple[int, ...],
        training: bool,
    ) -> Batch:
        rows = torch.from_numpy(
            np.stack([sample["tokens"] for sample in samples])
        )  # [b, s + 1]
        self._check(rows, indices)
        # each [b, s]
        tokens = rows[:, :-1].contiguous()
        labels = rows[:, 1:].contiguous()
        loss_mask = (labels != PAD).float()
        if self.eod_mask_loss:
            loss_mask[self._ends(tokens)] = 0.0
        # Conversations have a mask of their own, and packed samples keep documents apart.
        if "loss_mask" in samples[0]:
            masks = np.stack([sample["loss_mask"] for sample in samples])
            loss_mask *= torch.from_numpy(masks)[:, 1:]
        packed = "document_ids" in samples[0]
        if packed:
            ids = torch.from_numpy(
                np.stack([sample["document_ids"] for sample in samples])
            )
            loss_mask[ids[:, 1:] != ids[:, :-1]] = 0.0
            document_ids = ids[:, :-1].contiguous()
        elif self.reset_position_ids or self.reset_attention_mask:
            document_ids = document_numbers(self._ends(tokens))
        position_ids = torch.arange(self.seq_length).expand_as(tokens)
        if packed or self.reset_position_ids:
            position_ids = document_positions(document_ids)
        return Batch(
            tokens=tokens.clamp_(min=0),
            labels=labels.clamp_(min=0),
            loss_mask=loss_mask,
            position_ids=position_ids,
            document_ids=document_ids if packed or self.reset_attention_mask else None,
            sample_ids=sample_ids,
            training=training,
        )

    def _ends(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return where documents end; bool, of the shape of `tokens`."""
        assert self.eod is not None  # __post_init__ has checked it
        return tokens == self.eod

    def _check(self, rows: torch.Tensor, indices: Sequence[int]) -> None:
        if rows.shape[1] != self.seq_length + 1:
            raise DataError(
                f"the dataset has samples of {rows.shape[1]} tokens, and a sequence length of "
                f"{self.seq_length} takes {self.seq_length + 1}, the last one as a label only. "
                f"Make the dataset for a sequence length of {self.seq_length}."
            )
        low, high = torch.aminmax(rows)
        if low < PAD:
            outside = rows < PAD
        elif self.vocab_size is not None and high >= self.vocab_size:
            outside = rows >= self.vocab_size
        else:
            return
        row, column = outside.nonzero()[0].tolist()
        raise DataError(
            f"sample {indices[row]} holds token id {rows[row, column]}, outside the vocabulary "
            f"of {self.vocab_size}: the corpus was made with another tokenizer. Give the flags "
            "that megatron-ds preprocess had, or preprocess the text again."
        )


def blank_batch(
    samples: int, positions: int, device: torch.device | str = "cpu"
) -> Batch:
    """Return a batch of token 0 in which all positions count in the loss."""
    tokens = torch.zeros(samples, positions, dtype=torch.int64, device=device)
    position_ids = torch.arange(positions, device=device).expand(samples, -1)
    return Batch(
        tokens,
        tokens,
        torch.ones(samples, positions, device=device),
        position_ids,
        tuple(range(samples)),
    )


def _collator(config: "RunConfig", tokenizer: Tokenizer) -> GPTCollator:
    data = config.data
    return GPTCollator(
        config.model.seq_length,
        tokenizer.vocab_size,
        tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )


def _identity(config: "RunConfig") -> dict:
    """Return the options that change samples, as far as they are given."""
    options = {name: getattr(config.data, name) for name in ("pack_documents", "sft")}
    return {name: True for name, is_given in options.items() if is_given}


def _open(*corpus: Any, **options: Any) -> Dataset:
    """Open a corpus, whose reader is loaded by runs that have one."""
    from .gpt_corpus import open_corpus

    return open_corpus(*corpus, **options)


def _same_order(*corpus: Any) -> bool:
    from .gpt_corpus import same_order

    return same_order(*corpus)


GPT_DATA = DataKind(
    title="GPTDataset",
    tokens="tokens",
    documents=lambda corpus: range(len(corpus) + 1),
    mock=lambda count, config, tokenizer, seed: MockDataset(
        count,
        seq_length=config.model.seq_length,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        seed=seed,
    ),
    open=_open,
    collator=_collator,
    blank=blank_batch,
    fills=True,
    same_order=_same_order,
    has_masks=lambda config: config.data.sft,
    identity=_identity,
)
