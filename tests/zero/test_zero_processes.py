"""ZeRO over gloo: the same bits as over threads, where the backend reduces in place and while backward goes
on."""

from pathlib import Path

import pytest
import torch

from megatron_ds.mpu.collectives import barrier, share_memory
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.mapped_units import SharedParts
from megatron_ds.zero.number_blocks import Blocks
from megatron_ds.zero.settings import HIERARCHICAL
from tests.harness.processes import run_processes
from tests.harness.threads import run_ranks
from tests.zero.test_zero_hierarchy import train as train_hierarchy
from tests.zero.test_zero_optimizer import train, train_rank

pytestmark = pytest.mark.processes


@pytest.mark.quick
@pytest.mark.one_in(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "dtype, sent",
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_two_processes_give_the_same_bits_as_two_threads(stage, dtype, sent):
    options = (2, stage, dtype, 1.0, 0.05, True, sent)
    for (norms, parameters), (expected_norms, expected) in zip(
        run_processes(2, train_rank, *options), train(*options)
    ):
        assert norms == expected_norms
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected))


def train_quantized(*here):
    return train_hierarchy(
        *here, weight_blocks=Blocks(8, 256), gradient_blocks=Blocks(4, 256)
    )


@pytest.mark.quick
@pytest.mark.one_in(2)
@pytest.mark.parametrize("train_it", [train_hierarchy, train_quantized])
def test_a_hierarchy_of_four_processes_gives_the_bits_of_four_threads(train_it):
    options = (4, 2, HIERARCHICAL, torch.bfloat16)
    results = (
        run_processes(4, train_it, *options),
        run_ranks(4, lambda *here: train_it(*here, *options)),
    )
    for (norms, parameters), (expected_norms, expected) in zip(*results):
        assert norms == pytest.approx(
            expected_norms, rel=1e-12
        )  # of four terms, in another order
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected))


def test_sharding_over_three_processes_equals_whole_states_within_summation_order():
    for (norms0, whole), (norms1, split) in zip(
        run_processes(3, train_rank, 3, 0), run_processes(3, train_rank, 3, 1)
    ):
        assert norms0 == pytest.approx(norms1, rel=1e-6)
        for a, b in zip(whole, split):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def mapped_files():
    """Inodes of the package's shared memory in this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:megatron_ds" in line}


def see_each_other(rank, world):
    """(the other's weights as seen from here, before and after it wrote again; the file they are in)"""
    inherited = mapped_files()  # of tests that ran before in the process that forked
    group = share_memory(world.group("dp-cp", (0, 1), rank))
    parts = SharedParts(
        plan_layout([("w", 5000)], 10**6, shards=2), group, torch.float32
    )
    barrier(group)
    mapping = parts.map(0, 1)
    seen = []
    for step in (1, 2):
        parts.arrays[0].tensor.fill_(10 * step + rank)
        barrier(group)
        mapping.populate()
        seen.append(
            mapping.bytes.view(torch.float32).chunk(2)[1 - rank].unique().tolist()
        )
        mapping.drop()
        barrier(group)
    return seen, mapped_files() - inherited


def test_processes_of_one_host_see_each_others_weights_where_they_lie():
    (of_1, files_of_0), (of_0, files_of_1) = run_processes(2, see_each_other)
    assert of_1 == [[11.0], [21.0]] and of_0 == [[10.0], [20.0]]
    assert (
        len(files_of_0) == 2 and files_of_0 == files_of_1
    )  # by inode: its own, and the other's
