"""Parameter groups in force: rules of --param-group change what is trained, under every layout, and those of
muP keep the change of the logits independent of the width."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_replica
from megatron_ds.training.step import train_step
from tests.harness.layout_comparison import global_batch_share, random_samples
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

LENGTH, VOCAB, HEAD = 16, 64, 8
RULES = (
    "*.linear_fc1.weight:optimizer=muon,lr_factor=0.1",
    "*_layernorm.weight:lr_factor=3",
    "*.linear_proj.weight:optimizer=lion,lr_factor=0.1",
)


@pytest.mark.parametrize("layout", ["tp=2,pp=2,zero=1", "dp=2,zero=3"])
def test_three_optimizers_train_like_one_process(layout):
    """Muon has one matrix of each layer, Lion another, AdamW the rest."""
    job = [
        *tiny_job("llama", "fp32", True, 0.0, 2, GLOBAL_BATCH, 3),
        "--param-group",
        *RULES,
    ]
    difference, run = stray(job, layout, 3)
    assert difference.is_within(TOLERANCE["fp32"]), difference


def run(width, steps, *words, measure):
    """measure(weights before, weights after, logits) of `steps` + 1 steps of one process on one batch."""
    job = (
        f"--num-layers 2 --hidden-size {width} --num-attention-heads {width // HEAD} "
        f"--seq-length {LENGTH} --vocab-size {VOCAB} --mock-data --micro-batch-size 4 --train-iters 10 "
        "--lr 1 --clip-grad 0 --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 "
        "--disable-bias-linear --attention-dropout 0 --untie-embeddings-and-output-weights"
    ).split()
    config = parse([*job, *words], 1)
    samples = random_samples(4, LENGTH, VOCAB, seed=1)

    def main(rank, world):
        replica, logits = (
            build_replica(config, Mesh(config.grid(), rank, world.connect)),
            [],
        )
        replica.modules[-1].register_forward_hook(
            lambda *of_head: logits.append(of_head[2].detach())
        )
        found = []
        for step in range(steps + 1):
            before = {p.spec.name: p.detach().clone() for p in replica.parameters}
            train_step(
                replica,
                global_batch_share(samples, 0, 4, replica.config, replica.mesh),
                Progress(step=step),
                learning_rate=4e-3,
                weight_decay=0.0,
            )
            found.append(
                measure(
                    before,
                    {p.spec.name: p.detach() for p in replica.parameters},
                    logits[-1],
                )
            )
        return found

    [found] = run_ranks(1, main)
    return found


def test_rules_change_the_steps_and_the_initial_weights():
    rule = "*.linear_fc1.weight:lr_factor=0.25,init_factor=0.5"
    both = lambda before, after, logits: (before, after)
    [(w0, w1)], [(v0, v1)] = (
        run(16, 0, "--optimizer", "sgd", "--sgd-momentum", "0", *words, measure=both)
        for words in ((), ("--param-group", "*.0.*norm.weight:lr_factor=0.25"))
    )
    for name in w0:
        moved, factor = (
            w1[name] - w0[name],
            0.25 if ".0." in name and "norm" in name else 1.0,
        )
        torch.testing.assert_close(
            v1[name] - v0[name], factor * moved, rtol=1e-3, atol=1e-7
        )
    [(u0, _)] = run(16, 0, "--param-group", rule, measure=both)
    assert all(
        torch.equal(u0[name], w0[name] * (0.5 if "linear_fc1" in name else 1.0))
        for name in w0
    )


def change_of_logits(width, *words):
    [first, *_, last] = run(
        width, 3, *words, measure=lambda before, after, logits: logits
    )
    return (last - first).square().mean().sqrt().item()


def test_with_the_rules_of_mup_logits_change_alike_at_every_width():
    """Yang et al. 2022 (arXiv:2203.03466), table 3, as docs/scale/optimizers.md has it."""
    narrow, m = change_of_logits(16), 8
    wide = change_of_logits(
        16 * m,
        "--param-group",
        f"*.linear_*.weight:lr_factor={1 / m},init_factor={m**-0.5}",
        f"output_layer.weight:lr_factor={1 / m},init_factor={1 / m}",
    )
    assert wide / narrow == pytest.approx(1, abs=0.4)
    assert change_of_logits(16 * m) / narrow > 4
