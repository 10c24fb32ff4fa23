"""`BERT_DATA`: pairs of segments with masked tokens; mock samples; and the batches of both."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..batch import Batch
from ..gpt.gpt_data import blank_batch
from ..kind import DataKind, Sample
from ..text.indexed import IndexedDataset
from ..tokenizers import Tokenizer
from .bert_dataset import SPECIAL_TOKENS, BertDataset, BertOptions, make_sample, open_bert_dataset
from .masking import Masking, WordPieces, pieces_of

if TYPE_CHECKING:
    from ...config import RunConfig


class MockBertDataset:
    """Samples that count upwards through both segments: order and masked tokens can be predicted.

    A pure function of (seed, i). Ids 0 to 3 are [PAD], [CLS], [SEP] and [MASK]; every third other id
    continues a word.
    """

    def __init__(self, num_samples: int, vocab_size: int, options: BertOptions):
        self.num_samples, self.options = num_samples, options
        ids = np.arange(vocab_size)
        self.pieces = WordPieces(pad=0, cls=1, sep=2, mask=3, continues=(ids > 3) & (ids % 3 == 0))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.RandomState((self.options.seed + i) % 2**32)
        most = self.options.seq_length - SPECIAL_TOKENS
        target = most if random.random_sample() >= 0.1 else random.randint(2, most + 1)
        ends = sorted({0, *random.randint(1, target, 2).tolist(), target})
        first, step = random.randint(0, self.pieces.vocab_size), random.randint(1, 5)
        words = 4 + (first + step * np.arange(target)) % (self.pieces.vocab_size - 4)
        sentences = [words[a:b] for a, b in zip(ends, ends[1:])]
        return make_sample(sentences, target, self.pieces, self.options, random)


def bert_batch(samples: Sequence[Sample], indices: Sequence[int], sample_ids: tuple[int, ...],
               training: bool) -> Batch:
    """The `Collator` of samples of `BertDataset`."""
    column = lambda key: torch.from_numpy(np.stack([sample[key] for sample in samples]))       # [b, s]
    text = column("text")
    return Batch(
        tokens=text, labels=column("labels").clamp_(min=0), loss_mask=column("loss_mask").float(),
        position_ids=torch.arange(text.shape[1]).expand_as(text), sample_ids=tuple(sample_ids),
        training=training,
        attention_mask=(column("padding_mask") == 0)[:, None, None, :], token_types=column("types"),
        sentence_order=torch.tensor([sample["is_random"] for sample in samples]))


def _options(config: "RunConfig", seed: int) -> BertOptions:
    bert = config.bert
    return BertOptions(config.model.seq_length, seed,
                       Masking(bert.mask_prob, bert.mask_max_ngram, bert.mask_whole_words),
                       config.model.bert_binary_head, bert.short_seq_prob)


def _mock(count: int, config: "RunConfig", tokenizer: Tokenizer, seed: int) -> MockBertDataset:
    return MockBertDataset(count, tokenizer.vocab_size, _options(config, seed))


def _open(corpus: IndexedDataset, documents: range, *, title: str, num_samples: int | None,
          config: "RunConfig", tokenizer: Tokenizer) -> BertDataset:
    return open_bert_dataset(corpus, documents, _options(config, config.train.seed), title=title,
                             num_samples=num_samples, cache=config.data.data_cache_path,
                             pieces=pieces_of(tokenizer))


def _blank(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(*shape, dtype=dtype, device=device)
    return replace(blank_batch(samples, positions, device), token_types=zeros(samples, positions),
                   attention_mask=zeros(samples, 1, 1, positions, dtype=torch.bool),
                   sentence_order=zeros(samples))


BERT_DATA = DataKind(
    title="BertDataset", tokens="text", documents=lambda corpus: corpus.document_indices,
    mock=_mock, open=_open,
    collator=lambda config, tokenizer: bert_batch, blank=_blank,
    identity=lambda config: {**asdict(config.bert), "pairs": config.model.bert_binary_head})
