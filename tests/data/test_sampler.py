"""Which samples a rank sees, and batches made of them."""

import numpy as np
import pytest
import torch

from megatron_ds.data.kind import PAD
from megatron_ds.data.loading.loader import (
    ORDERS,
    Loader,
    cyclic,
    local_positions,
    single,
)
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.errors import ConfigError, DataError

pytestmark = pytest.mark.plan


class Counting:
    """Sample i is i, i+1, …: a token tells where it comes from."""

    def __init__(self, size, seq_length=5):
        self.size, self.seq_length = size, seq_length

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"tokens": np.arange(i, i + self.seq_length + 1, dtype=np.int64)}


def loader_of(dataset, seq_length=5, **options):
    return Loader(dataset, GPTCollator(seq_length, **options), micro_batch_size=2)


def test_micro_batches_are_contiguous_slices_rank_after_rank():
    assert local_positions(100, 8, 2, 0, 2) == [100, 101, 104, 105]
    assert local_positions(100, 8, 2, 1, 2) == [102, 103, 106, 107]
    assert local_positions(0, 6, 1, 2, 3) == [2, 5]


@pytest.mark.parametrize("order", list(ORDERS))
def test_every_number_of_ranks_sees_the_same_samples_in_each_global_batch(order):
    batches, order_of = {}, lambda positions: ORDERS[order](np.array(positions), 61)
    for dp_size, micro_batch in [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)]:
        for consumed in (0, 12, 24, 36, 48):
            parts = [
                order_of(local_positions(consumed, 12, micro_batch, r, dp_size))
                for r in range(dp_size)
            ]
            samples = sorted(np.concatenate(parts).tolist())
            assert batches.setdefault(consumed, samples) == samples
    seen = [s for batch in batches.values() for s in batch]
    assert len(seen) == len(set(seen)) == 60


def test_sizes_that_do_not_divide_are_an_error_with_a_remedy():
    with pytest.raises(ConfigError, match="multiple of 6"):
        local_positions(0, 10, 2, 0, 3)


def test_single_ends_with_the_data_and_says_so():
    assert single(np.arange(3, 7), 7).tolist() == [3, 4, 5, 6]
    with pytest.raises(
        DataError, match="the run needs sample 7, and the dataset has 7"
    ):
        single(np.arange(3, 8), 7)


def test_cyclic_sees_every_sample_once_an_epoch_in_a_new_order():
    one, two = cyclic(np.arange(0, 7), 7).tolist(), cyclic(np.arange(7, 14), 7).tolist()
    assert sorted(one) == sorted(two) == list(range(7)) and one != two
    assert one == torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist()
    assert (
        cyclic(np.arange(5, 9), 7).tolist() == one[5:] + two[:2]
    )  # a batch over the border


def megatron_cyclic(total, consumed, micro_batch, dp_rank, dp_size, batches):
    """Samples of a rank by Megatron's rule of data sharding, written out from its description."""
    chunk = micro_batch * dp_size
    active = total - total % chunk
    out = []
    for _ in range(batches):
        epoch, offset = consumed // active, consumed % active
        bucket = total // chunk * micro_batch
        order = torch.randperm(
            bucket, generator=torch.Generator().manual_seed(epoch)
        ).tolist()
        start = offset // dp_size
        out += [dp_rank * bucket + i for i in order[start : start + micro_batch]]
        consumed += chunk
    return out


@pytest.mark.parametrize(
    "total, micro_batch, dp_size", [(29, 2, 3), (24, 2, 3), (13, 1, 4), (9, 3, 1)]
)
def test_cyclic_in_shards_has_megatrons_values(total, micro_batch, dp_size):
    global_batch = micro_batch * dp_size * 2
    for consumed in (0, 3 * global_batch, 7 * global_batch):
        for rank in range(dp_size):
            positions = np.array(
                local_positions(consumed, global_batch, micro_batch, rank, dp_size)
            )
            samples = cyclic(
                positions, total, micro_batch=micro_batch, shards=dp_size
            ).tolist()
            assert samples == megatron_cyclic(
                total, consumed, micro_batch, rank, dp_size, 2
            )


def test_a_batch_has_tokens_labels_mask_and_stream_positions():
    batch = loader_of(Counting(50), eod=13, eod_mask_loss=True).batch(8, 8, 1, 2)
    assert batch.sample_ids == (10, 11, 14, 15) and batch.training
    assert batch.tokens[1].tolist() == [11, 12, 13, 14, 15] and batch.labels[
        1
    ].tolist() == [12, 13, 14, 15, 16]
    # the input is the end, not the label
    assert batch.loss_mask[:2].tolist() == [[1, 1, 1, 0, 1], [1, 1, 0, 1, 1]]
    assert batch.position_ids[2].tolist() == [0, 1, 2, 3, 4]
    assert (
        batch.tokens.dtype == batch.labels.dtype == torch.int64
        and batch.tokens.is_contiguous()
    )
    halves = batch.split(2)
    assert [h.sample_ids for h in halves] == [(10, 11), (14, 15)]
    plain = loader_of(Counting(50), eod=13).batch(8, 8, 1, 2, training=False)
    assert plain.loss_mask.min() == 1 and not plain.training


def test_padding_does_not_count_and_is_never_seen():
    class Short(Counting):
        def __getitem__(self, i):
            return {"tokens": np.array([1, 2, 3, PAD, PAD, PAD])}

    batch = loader_of(Short(4)).batch(0, 2)
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0]] * 2
    assert (
        batch.tokens.tolist() == [[1, 2, 3, 0, 0]] * 2
        and batch.labels.tolist() == [[2, 3, 0, 0, 0]] * 2
    )


def test_a_token_outside_the_vocabulary_is_an_error_naming_the_sample():
    loader = loader_of(Counting(50), vocab_size=14)
    assert loader.batch(0, 8).tokens.max() == 11
    with pytest.raises(
        DataError, match="sample 9 holds token id 14, outside the vocabulary of 14"
    ):
        loader.batch(8, 8)


def test_samples_of_another_length_are_an_error():
    with pytest.raises(DataError, match="6 tokens, and a sequence length of 7 takes 8"):
        Loader(Counting(50), GPTCollator(7), micro_batch_size=2).batch(0, 8)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_reading_ahead_changes_nothing(num_workers):
    plain = Loader(
        Counting(40), GPTCollator(5), micro_batch_size=2, dataloader_type="cyclic"
    )
    ahead = Loader(
        Counting(40),
        GPTCollator(5),
        micro_batch_size=2,
        dataloader_type="cyclic",
        num_workers=num_workers,
    )
    asked = [
        (0, 4, 0, 1),
        (4, 4, 0, 1),
        (8, 8, 0, 1),
        (16, 8, 1, 2),
        (4, 4, 0, 1),
        (8, 4, 0, 1),
    ]
    for request in asked:
        a, b = plain.batch(*request), ahead.batch(*request)
        assert torch.equal(a.tokens, b.tokens) and a.sample_ids == b.sample_ids
    ahead.close()


def test_reading_ahead_of_the_end_fails_only_when_the_end_is_asked_for():
    loader = Loader(Counting(8), GPTCollator(5), micro_batch_size=2, num_workers=2)
    assert loader.batch(4, 4).sample_ids == (4, 5, 6, 7)
    with pytest.raises(DataError, match="the data ends"):
        loader.batch(8, 4)
    loader.close()
