"""A curriculum over lengths trains as shorter samples would."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.layout_comparison import merge, random_samples, train_layout
from tests.harness.layout_runs import GLOBAL_BATCH, JOB_STEPS, NUM_LAYERS
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

pytestmark = pytest.mark.threads

CURRICULA = {
    "truncate": ["--curriculum-type", "seqlen_truncate"],
    "reshape": ["--curriculum-type", "seqlen_reshape"],
}


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
    length = "--curriculum-min-length 16 --curriculum-max-length 16 --curriculum-steps 1".split()
    run = trained([*job, *CURRICULA["truncate"], *length], samples)
    assert same(run, trained(with_values(job, seq_length=16), samples[:, :17]))
    assert not same(run, trained(job, samples))


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_folded_samples_train_as_twice_as_many_of_half_the_length(style):
    """22 of the 24 tokens: what fills no row is left out. Each sample's rows stand one after the other in its
    micro-batch."""
    job = tiny_job(style, "fp32", False, 0.0, NUM_LAYERS, GLOBAL_BATCH, JOB_STEPS)
    samples = random_samples(4 * GLOBAL_BATCH, SEQ_LENGTH, VOCAB, seed=1)
    length = "--curriculum-min-length 11 --curriculum-max-length 11 --curriculum-steps 1".split()
    run = trained([*job, *CURRICULA["reshape"], *length], samples)
    halves = torch.stack([samples[:, :12], samples[:, 11:23]], 1).flatten(0, 1)
    twice = with_values(job, seq_length=11, global_batch_size=2 * GLOBAL_BATCH)
    assert same(run, trained(twice, halves, micro_batch=4))
