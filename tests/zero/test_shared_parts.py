"""Weights that ranks of one host see where they lie: what is mapped, who may look when, and where it cannot
be."""

import gc
import logging
import mmap
import os
import random
import re
import tempfile
from pathlib import Path

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.host import shared_pages as host_memory
from megatron_ds.host.shared_pages import PAGE, Mapping, Part, share_pages
from megatron_ds.mpu.collectives import barrier, share_memory
from megatron_ds.zero.disk_tier import DiskTier
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.mapped_units import MappedUnit, SharedParts
from megatron_ds.zero.optimizer import ZeroOptimizer
from tests.harness.engines import BATCH, config_of, on_engines
from tests.harness.engines import train as train_engine
from tests.harness.samples import in_turns
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2, together=True)]

STEPS = 4


# --------------------------------------------------------------------------------------------- what is mapped
@pytest.mark.parametrize("seed", range(12))
def test_buckets_of_any_size_are_mapped_as_an_all_gather_would_lay_them(seed):
    draw = random.Random(seed)
    ranks, dtype = draw.choice([2, 3, 4]), draw.choice([torch.float32, torch.bfloat16])
    items = [
        (f"p{i}", draw.choice([1, 60, 700, 1024, 5000, 40_000]))
        for i in range(draw.randint(1, 6))
    ]
    layout = plan_layout(
        items, bucket_elements=draw.choice([1, 3000, 10**6]), shards=ranks
    )
    values = torch.randn(
        layout.numel, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)
    first = draw.randrange(len(layout.buckets))
    stop = draw.randint(first + 1, len(layout.buckets))
    start = layout.buckets[first].start

    def main(rank, world):
        group = share_memory(world.group("dp", tuple(range(ranks)), rank))
        SharedParts(layout, group, torch.float64)  # there are others before them
        parts = SharedParts(layout, group, dtype)
        barrier(group)
        mapping = parts.map(first, stop)
        results = []
        for factor in (1, 2):  # the owners' second values are seen, too
            for array, piece in zip(parts.arrays, layout.shard_pieces(rank)):
                array.tensor.copy_(factor * values[piece.start : piece.stop])
            barrier(group)
            mapping.populate()
            results.append(mapping.bytes.view(dtype).clone())
            mapping.bytes.zero_()  # nobody else sees that
            mapping.drop()
            barrier(group)
        return results

    expected = values[start : layout.buckets[stop - 1].stop]
    for once, twice in run_ranks(ranks, main, shares_memory=True):
        assert torch.equal(once, expected) and torch.equal(twice, 2 * expected)


def test_dropped_pages_leave_memory_and_cannot_be_read():
    nbytes = 128 << 20

    def main(rank, world):
        group = share_memory(world.group("dp", (0, 1), rank))
        group.memory.allocate(nbytes)[1].fill_(rank + 1)
        barrier(group)
        if rank:
            return None
        gc.collect()
        before = resident()
        mapping = Mapping(group.memory, [Part(1, 0, nbytes)])
        mapping.populate()
        mapped = resident() - before
        total = int(
            mapping.bytes.sum(dtype=torch.int64)
        )  # its temporary of 1 GiB may stay
        before = resident()
        mapping.drop()
        return mapped, before - resident(), total, protection(mapping.bytes.data_ptr())

    mapped, dropped, total, rights = run_ranks(2, main, shares_memory=True)[0]
    assert mapped == pytest.approx(nbytes, rel=0.05) and dropped == pytest.approx(
        nbytes, rel=0.05
    )
    assert total == 2 * nbytes
    assert rights.startswith("---")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def protection(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        if int(low, 16) <= address < int(high, 16):
            return rights
    raise AssertionError(f"nothing is mapped at {address:x}")


# ----------------------------------------------------------------------------------------- where it cannot be
def files_here() -> list[str]:
    gc.collect()  # what other tests left may hold some
    links = (
        os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")
    )
    return [
        os.readlink(link)
        for link in links
        if os.path.lexists(link) and "memfd" in os.readlink(link)
    ]


def share(rank, world):
    return (
        share_pages(rank, world.group("dp", (0, 1), rank).transport.all_gather_object)
        is None
    )


@pytest.mark.parametrize(
    "what, warns",
    [
        ("hosts", False),
        ("no files", False),
        ("no rights", True),
        ("no such process", True),
        ("another file", True),
    ],
)
def test_ranks_that_cannot_see_each_other_agree_that_they_do_not(
    what, warns, monkeypatch, caplog
):
    calls, files = [], files_here()
    if what == "hosts":
        monkeypatch.setattr(
            host_memory,
            "_host",
            lambda: calls.append(0) or (f"host{len(calls)}", "", ""),
        )
    elif what == "no files":  # on one rank
        make = host_memory._make_file
        first = lambda name: (
            calls.append(0) or (make(name) if len(calls) == 1 else None)
        )
        monkeypatch.setattr(host_memory, "_make_file", first)
    elif what == "no rights":
        refuse = PermissionError(13, "Permission denied")
        monkeypatch.setattr(os, "readlink", _raising(refuse, os.readlink))
    elif what == "another file":  # under a number that was used again
        monkeypatch.setattr(
            host_memory, "_make_file", lambda name: os.memfd_create("somebody-else")
        )
    else:
        monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    host_memory.warn_of_messages.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, share) == [True, True]
    monkeypatch.undo()
    assert files_here() == files
    assert len(caplog.records) == warns and all(
        "send tensors as messages" in r.message for r in caplog.records
    )


def _raising(error, otherwise):
    def readlink(path, *args, **kwargs):
        if str(path).startswith("/proc/") and "/fd/" in str(path):
            raise error
        return otherwise(path, *args, **kwargs)

    return readlink


def test_memory_and_files_are_given_back_with_the_last_tensor_that_looks_at_them():
    files = files_here()

    def main(rank, world):
        group = share_memory(world.group("dp", (0, 1), rank))
        group.memory.allocate(PAGE)[1].fill_(rank + 1)
        barrier(group)
        mapping = Mapping(group.memory, [Part(1, 0, 100), Part(0, 100, 60)])
        barrier(group)
        return mapping

    mappings = run_ranks(2, main, shares_memory=True)
    assert len(files_here()) == len(files) + 4  # whoever looks can go on doing so
    for mapping in mappings:
        mapping.populate()
        assert mapping.bytes.unique(return_counts=True)[1].tolist() == [60, 100]
    del mapping, mappings
    assert files_here() == files


def test_no_room_for_a_map_is_told_with_what_limits_it():
    def main(rank, world):
        group = share_memory(world.group("dp", (0, 1), rank))
        with pytest.raises(
            OSError,
            match=r"cannot map 4503599627370496 bytes.*Cannot allocate memory.*ulimit -v",
        ):
            Mapping(group.memory, [Part(0, 0, 2**52)])

    run_ranks(2, main, shares_memory=True)


# --------------------------------------------------------------------------------------------------- training
def train(layout: str, dtype: str, shares_memory: bool, steps: int = STEPS):
    """Of each rank (losses, whole weights, bytes sent, kinds of units)."""
    config = config_of(tiny_job("gpt2", dtype, False, 0.0, 4, BATCH, 8), layout)

    def main(engine):
        losses = train_engine(engine, range(steps))
        sent = dict(engine.mesh.traffic.bytes)
        with engine.optimizer.gathered(next(iter(engine.stages))):
            weights = {p.spec.name: p.detach().clone() for p in engine.parameters}
        kinds = {
            type(unit)
            for s in engine.optimizer.sets
            if s.plan.units
            for unit in s.store.units
        }
        return losses, weights, sent, kinds

    return on_engines(config, main, shares_memory)


LAYOUTS = [
    "dp=2,zero=3",
    "dp=4,zero=3,pin=1",
    "dp=4,zero=3,hpz=2",
    "dp=2,pp=2,zero=3,schedule=zb-h1",
    "dp=2,tp=2,zero=3,recompute=full",
    "dp=2,zero=3,offload=cpu,offload_param=cpu",
]


@pytest.mark.parametrize("layout, dtype", in_turns(LAYOUTS, ["fp32", "bf16"]))
def test_training_has_the_bits_and_the_traffic_of_messages(layout, dtype):
    for seen, sent in zip(train(layout, dtype, True), train(layout, dtype, False)):
        assert seen[3] == {MappedUnit} and MappedUnit not in sent[3]
        assert seen[0] == sent[0] and seen[2] == sent[2]
        assert all(torch.equal(seen[1][name], sent[1][name]) for name in sent[1])


def test_a_rank_that_cannot_begin_tells_the_others_also_where_they_share_memory(
    monkeypatch,
):
    """Its disk is full before weights are laid out: all ranks tell that, and none waits for another."""
    calls, arrays = [], DiskTier.arrays

    def full_on_one(home, sizes, dtype):
        calls.append(0)
        if len(calls) == 2:
            raise ConfigError("the disk is full")
        return arrays(home, sizes, dtype)

    monkeypatch.setattr(DiskTier, "arrays", full_on_one)
    with pytest.raises(ConfigError, match="rank 0: the disk is full"):
        train(f"dp=2,zero=3,offload=nvme,nvme={tempfile.gettempdir()}", "fp32", True)


def test_without_meeting_after_an_update_a_rank_would_see_weights_of_two_steps(
    monkeypatch,
):
    expected = [rank[0] for rank in train("dp=2,zero=3", "fp32", True)]
    monkeypatch.setattr(ZeroOptimizer, "_synchronize", lambda optimizer: None)
    assert [rank[0] for rank in train("dp=2,zero=3", "fp32", True)] != expected
