"""However samples are made, every layout trains as one process does: growing, packed, rearranged, sent by a
reader.

And a curriculum over lengths trains as shorter samples would.
"""

from functools import cache

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.grid.test_layout_grid import (
    HIDDEN,
    SAMPLED,
    job_of,
    layout_of,
    name_of,
    ranks,
    sampled_cases,
)
from tests.harness.covering import legal_cases
from tests.harness.layout_comparison import merge, random_samples, train_layout
from tests.harness.layout_runs import GLOBAL_BATCH, JOB_STEPS, NUM_LAYERS, stray
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SAMPLES, SEQ_LENGTH, TOLERANCE, VOCAB, tiny_job

pytestmark = pytest.mark.threads

CURRICULA = {
    "none": [],
    "truncate": ["--curriculum-type", "seqlen_truncate"],
    "reshape": ["--curriculum-type", "seqlen_reshape"],
}
# 8 of the 24 tokens, then 16 in steps 2 and 3, then all of them.
LAST_STEP = 5
GROWING = [
    "--curriculum-min-length",
    "8",
    "--curriculum-steps",
    "4",
    "--curriculum-length-step",
    "8",
]
OWN = {
    "curriculum": ("truncate", "reshape"),
    "samples": tuple(SAMPLES),
    "readers": ("all", "first"),
}
# Which part of a batch a rank has, and what is done to it; the others move state, or work in time.
TOUCHED = ("style", "tp", "pp", "dp", "sp", "documents", "ltd", "dropout")


def is_legal(case) -> bool:
    """With one rank in a tensor-parallel group there is nothing to send."""
    return case["tp"] > 1 or case["readers"] == "all"


def met_in(case) -> set[tuple]:
    """Pairs of our values with those of options that samples have to do with, and with one another; and each
    other value."""
    items = [item for item in case.items() if item != ("dtype", "bf16")]
    return {
        frozenset((own, item)) if item[0] in (*TOUCHED, *OWN) else item
        for own in items
        if own[0] in OWN
        for item in items
    }


@cache
def covering_cases() -> list[dict]:
    """Cases of the grid which together hold all that `met_in` tells."""
    pool = [
        case | own
        for case in sampled_cases()
        if case["dtype"] == "fp32"
        for own in legal_cases(OWN)
    ]
    pool = [case for case in pool if is_legal(case)]
    missing, chosen = set().union(*map(met_in, pool)), []
    while missing:
        chosen.append(
            max(pool, key=lambda case: (len(missing & met_in(case)), -ranks(case)))
        )
        missing -= met_in(chosen[-1])
    return chosen


def test_each_way_to_make_samples_meets_each_part_of_a_batch_and_every_value_of_the_grid_is_there():
    cases = covering_cases()
    for option, values in (SAMPLED | OWN).items():
        assert {case[option] for case in cases} == set(values) - {"bf16"}
        for own in OWN if option in TOUCHED else ():
            pairs = {
                (value, made)
                for value in values
                for made in OWN[own]
                if (option, value, made) != ("tp", 1, "first")
            }
            assert {(case[option], case[own]) for case in cases} == pairs, (option, own)


@pytest.mark.parametrize(
    "case",
    covering_cases(),
    ids=lambda case: "-".join([*(case[own] for own in OWN), name_of(case)]),
)
def test_samples_made_in_any_way_and_growing_train_like_one_process(case):
    difference, run = stray(
        [*job_of(case), *CURRICULA[case["curriculum"]], *GROWING],
        layout_of(case),
        LAST_STEP,
    )
    assert difference.is_within(TOLERANCE["fp32"]), difference
    split = case["tp"] if case["sp"] else 1
    rows = {
        length: SEQ_LENGTH // length if case["curriculum"] == "reshape" else 1
        for length in (8, 16, 24)
    }
    assert set.union(*(seen.block_inputs for seen in run.seen)) >= {
        (n // split, rows[n], HIDDEN) for n in rows
    }
    assert {seen.forwards for seen in run.seen} == {
        LAST_STEP * GLOBAL_BATCH // case["dp"] * case["chunks"]
    }
    readers = ranks(case) // (case["tp"] if case["readers"] == "first" else 1)
    assert run.calls.count("read") == LAST_STEP * readers
    assert (run.calls.count("packed") > 0) == (case["samples"] == "packed")
    assert (run.calls.count("fim") > 0) == (case["samples"] == "fim")
    apart = case["documents"] == "apart" or case["samples"] == "packed"
    assert {seen.most_documents > 1 for seen in run.seen} == {apart}


def trained(flags, samples, micro_batch=2, steps=4):
    """(losses, weights) of one process on int64 [n, s + 1] samples."""
    config = parse([*flags, "--micro-batch-size", str(micro_batch)], world_size=1)
    grid = Grid.fit(1, tp=1, pp=1, order=config.parallel.rank_order)
    trace, weights = merge(
        run_ranks(
            1,
            lambda rank, world: train_layout(
                config,
                Mesh(grid, rank, world.connect, torch.device("cpu")),
                steps,
                samples,
            ),
        )
    )
    return trace.losses, weights


def same(run, other) -> bool:
    return run[0] == other[0] and all(
        torch.equal(run[1][name], other[1][name]) for name in other[1]
    )


def with_values(job, **values):
    job = list(job)
    for name, value in values.items():
        job[job.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return job


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_truncated_samples_train_as_samples_that_were_never_longer(style):
    job = tiny_job(style, "fp32", False, 0.1, NUM_LAYERS, GLOBAL_BATCH, JOB_STEPS)
    samples = random_samples(4 * GLOBAL_BATCH, SEQ_LENGTH, VOCAB, seed=1)
    length = [
        "--curriculum-min-length",
        "16",
        "--curriculum-max-length",
        "16",
        "--curriculum-steps",
        "1",
    ]
    run = trained([*job, *CURRICULA["truncate"], *length], samples)
    assert same(run, trained(with_values(job, seq_length=16), samples[:, :17]))
    assert not same(run, trained(job, samples))


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_folded_samples_train_as_twice_as_many_of_half_the_length(style):
    """22 of the 24 tokens: what fills no row is left out. Each sample's rows stand one after the other in its
    micro-batch."""
    job = tiny_job(style, "fp32", False, 0.0, NUM_LAYERS, GLOBAL_BATCH, JOB_STEPS)
    samples = random_samples(4 * GLOBAL_BATCH, SEQ_LENGTH, VOCAB, seed=1)
    length = [
        "--curriculum-min-length",
        "11",
        "--curriculum-max-length",
        "11",
        "--curriculum-steps",
        "1",
    ]
    run = trained([*job, *CURRICULA["reshape"], *length], samples)
    halves = torch.stack([samples[:, :12], samples[:, 11:23]], 1).flatten(0, 1)
    twice = with_values(job, seq_length=11, global_batch_size=2 * GLOBAL_BATCH)
    assert same(run, trained(twice, halves, micro_batch=4))
