"""A device that runs out of memory ends the run with what would help, and which rank it was."""

import pytest
import torch

from megatron_ds.training import pretrain as entry

pytestmark = pytest.mark.plan


def test_running_out_of_memory_names_the_rank_and_what_saves_memory(
    monkeypatch, capsys
):
    def full(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but "
            "unallocated memory is …"
        )

    monkeypatch.setattr(entry, "train", full)
    code = entry.pretrain(
        "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 16 --num-attention-heads "
        "2 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3".split()
    )
    said = capsys.readouterr().err
    assert code != 0
    assert "out of memory on cpu of rank 0 (tp 0 of 1, pp 0 of 1, dp 0 of 1)" in said
    assert "--recompute-granularity full" in said
    assert (
        "Tried to allocate 2.00 GiB" in said and "reserved but unallocated" not in said
    )
