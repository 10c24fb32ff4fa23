"""Every optimizer trains the same under every layout as in one process, and continues in another one."""

import os

import pytest
import torch

from megatron_ds.checkpoint.load import load
from megatron_ds.checkpoint.save import save
from megatron_ds.config import parse
from megatron_ds.config.optimizer_facts import FACTS
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.planning.run_plan import optimizer_problems
from megatron_ds.ramps import Progress
from megatron_ds.training.build import build_engine
from megatron_ds.training.step import train_step
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.threads import run_ranks
from tools.compare_layouts import SEQ_LENGTH, TOLERANCE, VOCAB, tiny_job
from tools.layout_comparison import Difference, global_batch_share, parse_layout, random_samples

FEW = 20 if os.environ.get("MEGATRON_DS_TEST_ALL") else 3
LAYERS = 2
# LAMB moves each weight by lr times its own norm: the gradient of a step follows the rounding of the last.
TOLERANCES = {"lamb": Difference(loss=1e-5, grad_norm=1e-5, weights=1e-5)}
FLAGS = {"lamb": ["--lamb-min-coeff", "0", "--lr", "1e-2", "--lr-warmup-iters", "0"], "adam": ["--amsgrad"],
         "lion": ["--weight-decay", "0.3"]}
FLAGS |= {"onebit_adam": ["--freeze-step", "1"], "onebit_lamb": ["--freeze-step", "1"]}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.02".split()


def job_of(name, style="llama", untied=True, dtype="fp32", more=()):
    return [*tiny_job(style, dtype, untied, 0.0, LAYERS, GLOBAL_BATCH, FEW), "--optimizer", name,
            *FLAGS.get(name, []), *more]


@pytest.mark.parametrize("name, style, untied, layout", [
    ("lion", "llama", True, "tp=2,pp=2,zero=2"), ("lion", "llama", True, "dp=2,zero=1,offload=cpu"),
    ("adagrad", "gpt2", False, "tp=2,pp=2,zero=1,sp=1"),
    ("adagrad", "gpt2", False, "dp=2,zero=3,offload=cpu"),
    ("lamb", "gpt2", False, "tp=2,pp=2,zero=0,sp=1"), ("lamb", "gpt2", False, "tp=2,pp=2,dp=2,zero=1"),
    ("lamb", "gpt2", False, "tp=2,dp=2,zero=2"), ("lamb", "gpt2", False, "dp=4,zero=3,hpz=2")])
def test_layouts_train_like_one_process(name, style, untied, layout):
    difference, _ = stray(job_of(name, style, untied), layout, FEW)
    assert difference.is_within(TOLERANCES.get(name, TOLERANCE["fp32"])), difference


@pytest.mark.parametrize("layout", ["dp=4,ep=2,zero=0", "tp=2,dp=2,ep=2,zero=1"])
def test_a_ratio_is_that_of_all_experts_of_a_layer(layout):
    difference, _ = stray(job_of("lamb", more=EXPERTS), layout, FEW)
    assert difference.is_within(TOLERANCES["lamb"]), difference


# --------------------------------------------------------------------------------- checkpoints, bytes, dtypes
def run(name, layout, main, dtype="fp32"):
    """main(engine) on every rank."""
    request = parse_layout(layout, mbs="1")
    config = parse([*job_of(name, dtype=dtype), *request.flags], world_size=request.world_size)
    grid = config.grid(request.world_size)
    return run_ranks(request.world_size, lambda rank, world: main(
        build_engine(config, Mesh(grid, rank, world.connect, torch.device("cpu")))))


def train(engine, steps):
    samples = random_samples(16, SEQ_LENGTH, VOCAB, seed=1)
    return [train_step(engine, global_batch_share(samples, step * GLOBAL_BATCH, GLOBAL_BATCH, engine.config,
                                                  engine.mesh),
                       Progress(step=step), learning_rate=5e-3, weight_decay=0.1).loss for step in steps]


@pytest.mark.parametrize("name, before, after", [
    ("lion", "dp=2,zero=1", "tp=2,zero=3"), ("adagrad", "tp=2,zero=2", "dp=2,zero=1,offload=cpu"),
    ("lamb", "dp=2,zero=3", "tp=2,pp=2,zero=0"), ("adam", "dp=2,zero=2", "dp=1,zero=0")])
def test_a_run_continues_in_another_layout(name, before, after, tmp_path):
    groups = lambda engine: {"coordinates": engine.mesh.coordinates, "world": engine.mesh.group("world")}

    def first(engine):
        train(engine, range(2))
        pieces = list(engine.optimizer.pieces())
        save(tmp_path, 2, pieces, run={}, limit=None, **groups(engine))
        return engine.optimizer.extra_state(), {piece.kind for piece in pieces}, train(engine, range(2, 4))

    def second(engine):
        load(tmp_path, 2, list(engine.optimizer.pieces()), kinds=None, **groups(engine))
        engine.optimizer.load_extra_state(numbers)
        engine.optimizer.after_load()
        return train(engine, range(2, 4))

    numbers, kinds, expected = run(name, before, first)[0]
    amsgrad = {"max_exp_avg_sq"} if name == "adam" else set()
    assert kinds == {"weight", *FACTS[name].state} | amsgrad
    for losses in run(name, after, second):
        assert losses == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("name", FACTS)
def test_bytes_of_state_and_16_bit_weights_with_fp32_masters(name):
    def seen(engine):
        optimizer = engine.optimizer
        leaves = [leaf for s in optimizer.sets for leaf in s.leaves]
        before = [leaf.tensor.detach().clone() for leaf in leaves]
        train(engine, range(1))
        assert all(torch.equal(leaf.tensor.low, leaf.tensor.detach().bfloat16()) for leaf in leaves)
        assert not any(torch.equal(leaf.tensor, old) for leaf, old in zip(leaves, before))
        return optimizer.memory().optimizer / sum(leaf.tensor.numel() for leaf in leaves)

    tensors = len(FACTS[name].state) + (name == "adam")
    stage = 0 if name == "zero_one_adam" else 1
    assert run(name, f"dp=2,zero={stage}", seen, dtype="bf16") == [4 * tensors] * 2


def test_offloaded_lamb_is_refused_before_the_run():
    request = parse_layout("dp=2,zero=1,offload=cpu", mbs="1")
    with pytest.raises(ConfigError, match="needs whole tensors or norms of them, but offloaded"):
        parse([*job_of("lamb"), *request.flags], world_size=2, rules=(optimizer_problems,))
