"""`PREFERENCE_DATA`: pairs of answers, one in each row.

    corpus    document = [sequence: prompt, chosen answer] [sequence: prompt, rejected answer]
    row       | prompt chosen | prompt rejected | padding |       three documents to attention and positions

Both answers of a pair are in one row, so that no layout takes them apart: a row is the smallest share of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...batch.batch import Batch
from ...data.kind import PAD, Collator, DataKind, Sample
from ...data.samples.gpt_data import GPT_DATA
from ...data.text.indexed import IndexedDataset
from ...data.text.mask_file import LossMasks
from ...data.tokenizers import Tokenizer
from ...errors import DataError
from .answer_lengths import kept_lengths, report_cut_pairs

if TYPE_CHECKING:
    from ...config import RunConfig

ANSWERS = 2  # the chosen one first


class PairDataset:
    """Sample i is {"tokens": int64 [s + 1], padded, "document_ids": int64 [s + 1], 0 and 1 for the answers,
    "loss_mask": uint8 [s + 1], "reference": fp32 [2]}.

    Each epoch has the pairs in another order.

    pairs      the documents of the corpus
    reference  fp32 [pairs, 2], log-probabilities of the answers under the reference model; NaN until they are known
    """

    def __init__(
        self,
        masks: LossMasks,
        pairs: range,
        seq_length: int,
        num_samples: int | None,
        seed: int,
    ):
        self.masks = masks
        self.corpus = masks.corpus
        self.pairs = pairs
        self.seq_length = seq_length
        self.seed = seed
        self.num_samples = num_samples or len(pairs)
        self.reference = np.full((len(pairs), ANSWERS), np.nan, np.float32)
        first = self.corpus.document_indices[pairs.start] if pairs else 0
        count = ANSWERS * len(pairs)
        lengths = self.corpus.lengths[first : first + count].reshape(-1, ANSWERS)
        self.kept = kept_lengths(lengths, seq_length + 1)

    def __len__(self) -> int:
        return self.num_samples if self.pairs else 0

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        count = len(self.pairs)
        epoch, place = divmod(i, count)
        return self.pair(int(_order(count, self.seed, epoch)[place]))

    def reached(self, num_samples: int) -> np.ndarray:
        """Return the places in `pairs` of the first samples, ascending, each once."""
        count = len(self.pairs)
        if num_samples >= count:
            return np.arange(count)
        return np.sort(_order(count, self.seed, 0)[:num_samples])

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the pairs and their cuts in a cache, as JSON values."""
        return {**self.corpus.key(self.pairs), "sequence_length": self.seq_length}

    def pair(self, number: int) -> dict[str, np.ndarray]:
        """Return the sample of a pair, by its place in `pairs`."""
        size = self.seq_length + 1
        tokens = np.full(size, PAD, np.int64)
        document_ids = np.full(size, ANSWERS, np.int64)
        loss_mask = np.zeros(size, np.uint8)
        first = int(self.corpus.document_indices[self.pairs[number]])
        # The answers, one after the other.
        at = 0
        for answer, length in enumerate(self.kept[number].tolist()):
            end = at + length
            tokens[at:end] = self.corpus.get(first + answer, 0, length)
            loss_mask[at:end] = self.masks.get(first + answer, 0, length)
            document_ids[at:end] = answer
            at = end
        self.corpus.refuse_negative(tokens[:at], f"pair {number}")
        return {
            "tokens": tokens,
            "document_ids": document_ids,
            "loss_mask": loss_mask,
            "reference": self.reference[number],
        }


@lru_cache(maxsize=16)  # several corpora, each at the border of two epochs
def _order(pairs: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(pairs)


@dataclass(frozen=True)
class PairCollator:
    """Batches of pairs: those of `rows`, with the log-probabilities of the reference."""

    rows: Collator

    def __call__(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        sample_ids: tuple[int, ...],
        training: bool,
    ) -> Batch:
        batch = self.rows(samples, indices, sample_ids, training)
        reference = np.stack([sample["reference"] for sample in samples])
        return replace(batch, reference=torch.from_numpy(reference).unsqueeze(1))


def _open(
    corpus: IndexedDataset,
    documents: range,
    *,
    title: str,
    num_samples: int | None,
    config: "RunConfig",
    tokenizer: Tokenizer,
) -> PairDataset:
    # A corpus of texts or of conversations has no pairs.
    if (np.diff(corpus.document_indices) != ANSWERS).any():
        raise DataError(
            f"{corpus.prefix} has documents that are no pairs of answers. Make the corpus with megatron-ds preprocess "
            "--preference, or train on it without --dpo."
        )
    # A row is one pair, so that no maps of samples are needed.
    masks = LossMasks(corpus)
    corpus.check()
    length = config.model.seq_length
    dataset = PairDataset(masks, documents, length, num_samples, config.train.seed)
    report_cut_pairs(masks, documents, dataset.kept)
    return dataset


def _collator(config: "RunConfig", tokenizer: Tokenizer) -> PairCollator:
    return PairCollator(GPT_DATA.collator(config, tokenizer))


def _blank(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    batch = GPT_DATA.blank(samples, positions, device)
    reference = torch.zeros(samples, 1, ANSWERS, device=device)
    return replace(
        batch, reference=reference, document_ids=torch.zeros_like(batch.tokens)
    )


PREFERENCE_DATA = replace(
    GPT_DATA,
    title="Preference",
    documents=lambda corpus: range(0, len(corpus) + 1, ANSWERS),
    open=_open,
    collator=_collator,
    blank=_blank,
    fills=False,
    same_order=lambda *numbers: True,
    has_masks=lambda config: True,
    identity=lambda config: {"preference": True},
)


def pairs_of_answers(own: DataKind, config: "RunConfig") -> DataKind:
    """Return the kind of the data of a run on pairs, whatever that of its model is."""
    return PREFERENCE_DATA
