"""What a GPT reads: documents laid end to end and cut every s tokens."""

import torch

from ..batch import Batch
from ..kind import DataKind
from .collate import GPTCollator
from .gpt_dataset import open_gpt_dataset
from .mock_dataset import MockDataset
from .packing import open_packed_dataset


def _mock(count: int, config, tokenizer, seed: int) -> MockDataset:
    return MockDataset(count, seq_length=config.model.seq_length, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod,
                       seed=seed)


def _documents(corpus) -> range:
    """Each sequence is one."""
    return range(len(corpus) + 1)


def _open(corpus, documents: range, *, title: str, num_samples: int | None, config, tokenizer):
    cut = open_packed_dataset if config.data.pack_documents else open_gpt_dataset
    return cut(corpus, documents, title=title, seq_length=config.model.seq_length, num_samples=num_samples,
               seed=config.train.seed, cache=config.data.data_cache_path)


def blank_batch(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    """Token 0 everywhere, and all of it counts."""
    tokens = torch.zeros(samples, positions, dtype=torch.int64, device=device)
    places = torch.arange(positions, device=device).expand(samples, -1)
    return Batch(tokens, tokens, torch.ones(samples, positions, device=device), places, tuple(range(samples)))


def _collator(config, tokenizer) -> GPTCollator:
    data = config.data
    return GPTCollator(
        config.model.seq_length, tokenizer.vocab_size, tokenizer.eod, eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask)


GPT_DATA = DataKind(title="GPTDataset", tokens="tokens", documents=_documents, mock=_mock, open=_open, collator=_collator,
                    blank=blank_batch, fills=True,
                    identity=lambda config: {"pack_documents": True} if config.data.pack_documents else {})
