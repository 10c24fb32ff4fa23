"""A batch that one rank of a tensor-parallel group reads is the batch that each would have read."""

import numpy as np
import pytest
import torch

from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.errors import DataError
from megatron_ds.training.samples import SharedReader
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

EOD = 7


class Rows:
    def __init__(self, highest=20):
        self.highest, self.read = highest, 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.read += 1
        return {"tokens": np.random.default_rng(i).integers(0, self.highest, 10)}


def batches(tp_size, resets, datasets, shared=True, **where):
    def main(rank, world):
        collate = GPTCollator(
            9, 20, EOD, reset_position_ids=resets, reset_attention_mask=resets
        )
        loader = Loader(datasets[rank], collate, micro_batch_size=2, num_workers=rank)
        tp = world.group("tp", tuple(range(tp_size)), rank)
        reader = SharedReader(loader, tp, torch.device("cpu")) if shared else loader
        got = [
            reader.batch(consumed, 8, 1, 2, training=consumed > 0)
            for consumed in (0, 8, 24)
        ]
        reader.close()
        return got

    return run_ranks(tp_size, main)


@pytest.mark.parametrize("resets", [False, True])
def test_all_ranks_get_what_the_first_reads_and_it_alone_reads(resets):
    datasets = [Rows() for _ in range(3)]
    each = batches(1, resets, [Rows()], shared=False)[0]
    for rank, got in enumerate(batches(3, resets, datasets)):
        for ours, own in zip(got, each, strict=True):
            assert ours.sample_ids == own.sample_ids and ours.training == own.training
            assert (
                ours.tensors().keys() == own.tensors().keys()
                and ("document_ids" in ours.tensors()) == resets
            )
            for name, tensor in own.tensors().items():
                assert torch.equal(getattr(ours, name), tensor), name
            assert (ours.position_ids.stride(0) == 0) == (not resets)
        assert (datasets[rank].read > 0) == (rank == 0)


def test_what_the_reader_cannot_read_is_an_error_on_every_rank():
    told = []

    def main(rank, world):
        loader = Loader(Rows(highest=99), GPTCollator(9, 20), micro_batch_size=2)
        reader = SharedReader(
            loader, world.group("tp", (0, 1), rank), torch.device("cpu")
        )
        with pytest.raises(DataError, match="outside the vocabulary of 20"):
            reader.batch(0, 8, 0, 1)
        told.append(rank)

    run_ranks(2, main)
    assert sorted(told) == [0, 1]
