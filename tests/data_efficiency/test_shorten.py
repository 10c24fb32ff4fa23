"""Shorter batches against loops over their samples."""

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.extensions.data_efficiency.seqlen_curriculum import fold, truncate

pytestmark = pytest.mark.plan


def make_batch(b=3, s=10, **more) -> Batch:
    stream = torch.randint(50, (b, s + 1), generator=torch.Generator().manual_seed(0))
    return Batch(
        tokens=stream[:, :-1],
        labels=stream[:, 1:],
        loss_mask=(stream[:, 1:] % 3 > 0).float(),
        position_ids=torch.arange(s).expand(b, s),
        sample_ids=tuple(range(40, 40 + b)),
        **more,
    )


def test_truncation_keeps_the_first_positions():
    batch = make_batch(attention_mask=torch.rand(3, 1, 10, 10) > 0.5)
    short = truncate(batch, 4)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(short, name), getattr(batch, name)[:, :4]), name
    assert torch.equal(short.attention_mask, batch.attention_mask[:, :, :4, :4])
    assert (short.sample_ids, short.rows_per_sample, short.seq_length) == (
        batch.sample_ids,
        1,
        4,
    )
    assert truncate(batch, 10) is batch and truncate(batch, 11) is batch
    assert short.position_ids.stride(0) == 0  # one row for all samples: looked up once


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7])
def test_folding_lays_the_pieces_of_each_sample_one_after_the_other(length):
    batch = make_batch(attention_mask=torch.rand(3, 1, 10, 10) > 0.5)
    short, row = fold(batch, length), 0
    for i in range(3):
        for start in range(0, 10 - length + 1, length):
            piece = slice(start, start + length)
            for name in ("tokens", "labels", "loss_mask"):
                assert torch.equal(
                    getattr(short, name)[row], getattr(batch, name)[i, piece]
                ), name
            assert short.position_ids[row].tolist() == list(range(length))
            assert torch.equal(
                short.attention_mask[row, 0], batch.attention_mask[i, 0, piece, piece]
            )
            row += 1
    assert (short.size, short.rows_per_sample, len(set(short.sample_ids))) == (
        row,
        10 // length,
        row,
    )
    assert short.sample_ids[:: 10 // length] == batch.sample_ids
    assert fold(batch, 10) is batch


def test_positions_of_a_document_begin_anew_in_each_row_and_at_each_document():
    """Rows of 4 of two samples, with documents that begin at 3 and at 5, and at 8 alone."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    short = fold(Batch(positions, positions, positions.float(), positions, (0, 1)), 4)
    assert short.position_ids.tolist() == [
        [0, 1, 2, 0],
        [0, 0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_micro_batches_count_samples_whatever_they_were_folded_into():
    parts = fold(make_batch(b=4, s=9), 3).split(2)
    assert [(part.size, part.rows_per_sample) for part in parts] == [(6, 3), (6, 3)]
    assert [part.sample_ids[::3] for part in parts] == [(40, 41), (42, 43)]
