"""Documents that share a sample: positions that start anew, and attention that stays within each."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.documents import (
    Documents,
    document_numbers,
    document_positions,
    document_starts,
)
from megatron_ds.config import DataConfig
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.extensions.data_efficiency.seqlen_curriculum import fold, truncate
from megatron_ds.ops.core_attention import attention, reference_attention
from megatron_ds.ops.kernel_table import selected
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.training.samples import warn_without_ends

pytestmark = pytest.mark.plan

EOD = 9


class Rows:
    """A dataset of given rows."""

    def __init__(self, *rows):
        self.rows = np.array(rows, np.int64)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}


ROWS = Rows(
    [1, 2, EOD, 3, 4, 5, EOD, 6],
    [EOD, EOD, 1, 2, 3, 4, 5, 6],
    [1, 2, 3, 4, 5, 6, 7, EOD],
)


def batch_of(**options) -> Batch:
    return Loader(ROWS, GPTCollator(7, eod=EOD, **options), micro_batch_size=1).batch(
        0, 3
    )


def megatron_batch(tokens):
    """(mask, positions) by Megatron's rule, from its description: after each end everything before is closed
    off."""
    s = len(tokens)
    mask, positions = np.tril(np.ones((s, s), bool)), np.arange(s)
    last = 0
    for end in np.flatnonzero(np.array(tokens) == EOD):
        mask[end + 1 :, : end + 1] = False
        positions[end + 1 :] -= end + 1 - last
        last = end + 1
    return ~mask, positions


def test_positions_and_masks_are_megatrons():
    batch = batch_of(
        reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    for row in range(3):
        mask, positions = megatron_batch(batch.tokens[row].tolist())
        assert batch.position_ids[row].tolist() == positions.tolist()
        assert torch.equal(
            batch.documents.bias(torch.float32)[row, 0] < 0, torch.from_numpy(mask)
        )
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [
        [1, 1, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1, 1],
        [1] * 7,
    ]


def test_each_option_does_its_own_part():
    plain, mask, positions = (
        batch_of(),
        batch_of(reset_attention_mask=True),
        batch_of(reset_position_ids=True),
    )
    assert plain.document_ids is plain.documents is positions.document_ids is None
    assert torch.equal(plain.position_ids, mask.position_ids) and not torch.equal(
        plain.position_ids, positions.position_ids
    )
    assert mask.document_ids.tolist() == [
        [0, 0, 0, 1, 1, 1, 1],
        [0, 1, 2, 2, 2, 2, 2],
        [0] * 7,
    ]


@pytest.mark.parametrize(
    "rows, packed, told",
    [(ROWS, False, False), (Rows([1, 2, 3]), False, True), (Rows([1, 2]), True, False)],
)
def test_a_corpus_without_ends_of_documents_is_told_of(caplog, rows, packed, told):
    data = DataConfig(
        reset_attention_mask=True, eod_mask_loss=True, pack_documents=packed
    )
    warn_without_ends(data, rows, EOD)
    assert (
        "--eod-mask-loss and --reset-attention-mask had no effect" in caplog.text
    ) == told


def test_micro_batches_keep_their_documents():
    batch = batch_of(reset_attention_mask=True, reset_position_ids=True)
    for row, part in enumerate(batch.split(1)):
        assert torch.equal(part.document_ids, batch.document_ids[row : row + 1])
        assert part.documents is part.documents and torch.equal(
            part.documents.ids, part.document_ids
        )


def test_a_row_of_positions_that_serves_all_samples_stays_one_row_when_moved():
    moved = batch_of().to(torch.device("meta"))
    assert (
        moved.position_ids.stride(0) == 0
        and moved.position_ids.shape == (3, 7)
        and moved.document_ids is None
    )


def random_ids(b, s, mean, seed):
    ends = torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 1 / mean
    return document_numbers(ends)


def test_starts_and_positions_equal_a_plain_loop():
    ids = random_ids(4, 50, 7, seed=0)
    starts = [[row.index(n) for n in row] for row in ids.tolist()]
    assert document_starts(ids).tolist() == starts
    assert document_positions(ids).tolist() == [
        [i - start for i, start in enumerate(row)] for row in starts
    ]


def by_document(q, k, v, ids):
    """Each document of each sample by itself, through attention without documents; float64."""
    out = torch.empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3], dtype=q.dtype)
    for b in range(q.shape[1]):
        for n in ids[b].unique().tolist():
            here = ids[b] == n
            out[here, b] = reference_attention(
                *(t[here, b : b + 1] for t in (q, k, v))
            )[:, 0]
    return out


def attend_without_kernels(q, k, v, documents):
    with selected("torch"):
        return attention(q, k, v, KeyVisibility(documents=documents))


PATHS = {
    "chosen": lambda q, k, v, documents: attention(
        q, k, v, KeyVisibility(documents=documents)
    ),
    "torch": attend_without_kernels,
    "reference": lambda q, k, v, documents: reference_attention(
        q, k, v, KeyVisibility(documents=documents)
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "b, s, n, g, mean",
    [
        (1, 128, 2, 2, 10),
        (3, 135, 4, 2, 40),
        (2, 192, 2, 1, 1000),
        (2, 319, 3, 3, 150),
    ],
)
def test_attention_with_documents_equals_attention_to_each_of_them(
    path, b, s, n, g, mean
):
    draw = partial(
        torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(s)
    )
    q, k, v, dout = (
        draw(s, b, n, 32),
        draw(s, b, g, 32),
        draw(s, b, g, 32),
        draw(s, b, n * 32),
    )
    ids = random_ids(b, s, mean, seed=1)
    expected = [t.requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
    out = by_document(*expected, ids)
    out.backward(dout)
    ours = [t.float().requires_grad_() for t in (q, k, v)]
    result = PATHS[path](*ours, documents=Documents(ids))
    result.backward(dout.float())
    # fp32 against fp64
    torch.testing.assert_close(result.double(), out, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours, expected):
        torch.testing.assert_close(
            mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5
        )


def test_boundaries_of_documents_are_noted_before_ids_leave_the_cpu():
    """On the way of a batch through a run: to a device, shortened, narrowed to some positions, and split."""
    batch = batch_of(reset_attention_mask=True)
    right = ((3,), (1, 2), ())
    assert batch.documents.boundaries == right and batch.boundaries is None
    moved = batch.to(torch.device("meta"))
    assert moved.documents.boundaries == right
    assert truncate(moved, 3).documents.boundaries == ((), (1, 2), ())
    noted = replace(batch, boundaries=right)
    assert fold(noted, 3).boundaries == ((), (), (1, 2), (), (), ())
    for shorten in (truncate, fold):
        assert shorten(noted, 3).boundaries == shorten(batch, 3).documents.boundaries
    narrowed = replace(moved, whole=moved).at_places(
        torch.arange(0, 7, 2, device="meta")
    )
    assert narrowed.documents.boundaries is None
    assert [micro.documents.boundaries for micro in narrowed.whole.split(1)] == [
        (row,) for row in right
    ]
    assert [micro.whole.documents.boundaries for micro in narrowed.split(1)] == [
        (row,) for row in right
    ]
