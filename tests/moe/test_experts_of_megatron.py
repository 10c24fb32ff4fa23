"""A layer with experts against megatron-core's own, on four gloo processes each: outputs, and gradients of inputs,
router and experts, on every rank, with experts that are divided apart from dense layers and in the same way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.models.block import make_feed_forward
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.mesh import Mesh
from tests.harness import megatron_experts as theirs
from tests.harness.gpt_runs import make_batch
from tests.harness.limits import HUNG
from tests.harness.megatron_core import skip_reason
from tests.harness.processes import run_processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.rest,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "none"),
]

# megatron-core's all-to-all gathers rows of unequal numbers over the ranks of an expert, which gloo cannot.
JOBS = {
    "spanning": dict(tp=2, ep=2, etp=1, dispatcher="alltoall", shared=False),
    "gathered": dict(tp=2, ep=2, etp=1, dispatcher="allgather", shared=True),
    "everywhere": dict(tp=2, ep=4, etp=1, dispatcher="alltoall", shared=True),
    "tp": dict(tp=2, ep=2, etp=2, dispatcher="allgather", shared=False),
    "beyond": dict(tp=1, ep=2, etp=2, dispatcher="allgather", shared=False),
}
NEAR = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """megatron-core's results of all jobs."""
    folder = tmp_path_factory.mktemp("theirs")
    jobs = [{"name": name, **job} for name, job in JOBS.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.megatron_experts", str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def config_of(job: dict):
    flags = (
        f"--num-layers 1 --hidden-size {theirs.HIDDEN} --num-attention-heads 4 --vocab-size 96 "
        f"--seq-length {theirs.SEQUENCE} --micro-batch-size {theirs.SAMPLES} --lr 1 --train-iters 1 --mock-data "
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        f"--num-experts {theirs.EXPERTS} --moe-router-topk {theirs.TOP} --moe-ffn-hidden-size {theirs.FFN} "
        "--moe-router-load-balancing-type none --moe-router-dtype fp32 "
        f"--tensor-model-parallel-size {job['tp']} --expert-model-parallel-size {job['ep']} "
        f"--expert-tensor-parallel-size {job['etp']}"
    )
    words = flags.split()
    if job["tp"] > 1:
        words.append("--sequence-parallel")
    if job["shared"]:
        words += ["--moe-shared-expert-intermediate-size", str(theirs.SHARED)]
    return parse(words, world_size=theirs.RANKS)


def batch_of(config) -> Batch:
    batch = make_batch(config.model, b=theirs.SAMPLES, s=theirs.SEQUENCE)
    return batch.with_ledger(DISCARDING)


def load(parameter, whole: torch.Tensor, mesh: Mesh) -> None:
    """Fill this rank's part of a whole weight."""
    for box in parameter.spec.boxes(mesh.coordinates):
        to = tuple(slice(a, a + n) for a, n in zip(box.local, box.sizes))
        of = tuple(slice(a, a + n) for a, n in zip(box.logical, box.sizes))
        parameter.data[to] = whole[of]


def run_ours(rank, world, job):
    """The ranks of the groups, the output, and gradients of this rank."""
    config = config_of(job)
    mesh = Mesh(config.grid(), rank, world.connect, torch.device("cpu"))
    ctx = ParallelContext(mesh, sequence_parallel=job["tp"] > 1)
    layer = make_feed_forward(config.model, theirs.EXPERTS, "mlp", ctx, 0.02)
    weights = theirs.weights_of(job["shared"])
    held = {p.spec.name.removeprefix("mlp."): p for p in layer.parameters()}
    assert held.keys() == weights.keys()
    for name, p in held.items():
        load(p, weights[name], mesh)
    x, factor = theirs.inputs_of(
        mesh.coordinate("dp"), mesh.coordinate("tp"), job["tp"]
    )
    output = layer(x.requires_grad_(), batch_of(config))
    (output * factor).sum().backward()
    return {
        "ranks": {axis: list(mesh.group(axis).ranks) for axis in ("tp", "ep", "etp")},
        "input": x.detach(),
        "output": output.detach(),
        "gradients": {"input": x.grad} | {name: p.grad for name, p in held.items()},
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference beside the largest value expected."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", JOBS)
def test_outputs_and_gradients_are_those_of_megatron_core(name, folder):
    job = JOBS[name]
    for rank, ours in enumerate(run_processes(theirs.RANKS, run_ours, job)):
        peer = torch.load(folder / f"{name}_{rank}.pt")
        assert ours["ranks"] == peer["ranks"]
        assert torch.equal(ours["input"], peer["input"])
        assert ours["gradients"].keys() == peer["gradients"].keys()
        assert distance(ours["output"], peer["output"]) < NEAR
        for of, gradient in ours["gradients"].items():
            assert distance(gradient, peer["gradients"][of]) < NEAR, (rank, of)
    spans = len({*peer["ranks"]["tp"]} & {*peer["ranks"]["ep"]})
    assert spans == (2 if name in ("spanning", "gathered", "everywhere") else 1)
