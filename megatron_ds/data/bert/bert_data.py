"""What a BERT reads: pairs of segments of sentences, some tokens masked; and how its samples become a batch."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from ..batch import Batch
from ..gpt.collate import Sample
from ..gpt.gpt_data import blank_batch
from ..kind import DataKind
from .bert_dataset import MockBertDataset, open_bert_dataset
from .masking import Masking
from .word_pieces import pieces_of


def masking_of(config) -> Masking:
    bert = config.bert
    return Masking(bert.mask_prob, bert.mask_max_ngram, bert.mask_whole_words)


def _mock(count: int, config, tokenizer, seed: int) -> MockBertDataset:
    return MockBertDataset(count, seq_length=config.model.seq_length, vocab_size=tokenizer.vocab_size, seed=seed,
                           masking=masking_of(config), pairs=config.model.bert_binary_head)


def _open(corpus, documents: range, *, title: str, num_samples: int | None, config, tokenizer):
    return open_bert_dataset(corpus, documents, title=title, num_samples=num_samples, seq_length=config.model.seq_length,
                             seed=config.train.seed, cache=config.data.data_cache_path, pieces=pieces_of(tokenizer),
                             masking=masking_of(config), pairs=config.model.bert_binary_head,
                             short_seq_prob=config.bert.short_seq_prob)


def bert_batch(samples: Sequence[Sample], numbers: Sequence[int], sample_ids: tuple[int, ...], training: bool) -> Batch:
    """The `Collator` of samples of `BertDataset`."""
    column = lambda key: torch.from_numpy(np.stack([sample[key] for sample in samples]))       # [b, s]
    text = column("text")
    return Batch(
        tokens=text, labels=column("labels").clamp_(min=0), loss_mask=column("loss_mask").float(),
        position_ids=torch.arange(text.shape[1]).expand_as(text), sample_ids=tuple(sample_ids), training=training,
        attention_mask=(column("padding_mask") == 0)[:, None, None, :], token_types=column("types"),
        sentence_order=torch.tensor([sample["is_random"] for sample in samples]))


def _blank(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(*shape, dtype=dtype, device=device)
    return replace(blank_batch(samples, positions, device), token_types=zeros(samples, positions),
                   attention_mask=zeros(samples, 1, 1, positions, dtype=torch.bool), sentence_order=zeros(samples))


BERT_DATA = DataKind(
    title="BertDataset", tokens="text", documents=lambda corpus: corpus.document_indices, mock=_mock, open=_open,
    collator=lambda config, tokenizer: bert_batch, blank=_blank,
    identity=lambda config: {**asdict(config.bert), "pairs": config.model.bert_binary_head})
