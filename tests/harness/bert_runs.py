"""Batches and runs of our BERT, as the model tests need them."""

from functools import partial

import torch

from megatron_ds.batch.batch import Batch

from .model_runs import run_model

run_bert = partial(run_model, "bert")


def random_bert_batch(
    vocab_size: int, ids: tuple[int, ...], s: int, seed: int = 0, **changes
) -> Batch:
    """Samples of different lengths, a pure function of their ids: the first is full, others end earlier."""
    rows = [_sample(vocab_size, i, s, seed) for i in ids]
    tokens, labels, loss_mask, token_types, padding, order = map(
        torch.stack, zip(*rows)
    )
    batch = dict(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=torch.arange(s).expand(len(ids), s),
        sample_ids=tuple(ids),
        token_types=token_types,
        attention_mask=padding[:, None, None, :],
        sentence_order=order,
    )
    return Batch(**{**batch, **changes})


def _sample(vocab_size, i, s, seed):
    draw = torch.Generator().manual_seed(1000 * seed + i)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))
    length = s if i % 3 == 0 else number(s // 2, s)
    places, pivot = torch.arange(s), number(2, length - 1)
    tokens = torch.randint(vocab_size, (s,), generator=draw)
    labels = torch.randint(vocab_size, (s,), generator=draw)
    loss_mask = ((torch.rand(s, generator=draw) < 0.3) & (places < length)).float()
    loss_mask[1] = 1.0
    types = ((places >= pivot) & (places < length)).long()
    return (
        tokens,
        labels,
        loss_mask,
        types,
        places >= length,
        torch.tensor(number(0, 2)),
    )
