"""What every optimizer holds, offloads and saves; a run continues in another layout."""

import os
import tempfile

import pytest
import torch

from megatron_ds.checkpoint.load import load
from megatron_ds.checkpoint.save import save
from megatron_ds.config import parse
from megatron_ds.config.optimizer_facts import FACTS
from megatron_ds.errors import ConfigError
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.optim import default_groups
from megatron_ds.planning.run_plan import optimizer_problems
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import build_engine
from megatron_ds.training.step import train_step
from megatron_ds.zero.settings import STAGES, ZeroSettings
from megatron_ds.zero.tiers import OffloadSettings
from tests.harness.layout_comparison import (
    global_batch_share,
    parse_layout,
    random_samples,
)
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, TOLERANCE, VOCAB, tiny_job

pytestmark = pytest.mark.threads

FEW = 20 if os.environ.get("MEGATRON_DS_TEST_ALL") else 3
LAYERS = 2
FLAGS = {
    "lamb": ["--lamb-min-coeff", "0", "--lr", "1e-2", "--lr-warmup-iters", "0"],
    "adam": ["--amsgrad"],
    "lion": ["--weight-decay", "0.3"],
    "muon": (
        "--muon-scale-mode match_rms_adamw --muon-use-nesterov --lr 1e-2 --muon-scalar-lr 1e-3 "
        "--lr-warmup-iters 0"
    ).split(),
}
FLAGS |= {"onebit_adam": ["--freeze-step", "1"], "onebit_lamb": ["--freeze-step", "1"]}


def job_of(name, style="llama", untied=True, dtype="fp32", more=()):
    return [
        *tiny_job(style, dtype, untied, 0.0, LAYERS, GLOBAL_BATCH, FEW),
        "--optimizer",
        name,
        *FLAGS.get(name, []),
        *more,
    ]


@pytest.mark.parametrize("layout", ["tp=2,pp=2,zero=2", "dp=2,zero=1,offload=cpu"])
def test_lion_trains_like_one_process(layout):
    """Lion is not in the grid: the sign of its update is that of rounding where a gradient is nearly zero."""
    difference, _ = stray(job_of("lion"), layout, FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference


# --------------------------------------------------------------------------------- checkpoints, bytes, dtypes
def run(name, layout, main, dtype="fp32"):
    """main(engine) on every rank."""
    request = parse_layout(layout, mbs="1")
    config = parse(
        [*job_of(name, dtype=dtype), *request.flags], world_size=request.world_size
    )
    grid = config.grid(request.world_size)
    return run_ranks(
        request.world_size,
        lambda rank, world: main(
            build_engine(config, Mesh(grid, rank, world.connect, torch.device("cpu")))
        ),
    )


def train(engine, steps):
    samples = random_samples(16, SEQ_LENGTH, VOCAB, seed=1)
    return [
        train_step(
            engine,
            global_batch_share(
                samples, step * GLOBAL_BATCH, GLOBAL_BATCH, engine.config, engine.mesh
            ),
            Progress(step=step),
            learning_rate=5e-3,
            weight_decay=0.1,
        ).loss
        for step in steps
    ]


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("lion", "dp=2,zero=1", "tp=2,zero=3"),
        ("adagrad", "tp=2,zero=2", "dp=2,zero=1,offload=cpu"),
        ("lamb", "dp=2,zero=3", "tp=2,pp=2,zero=0"),
        ("muon", "dp=2,zero=3", "tp=2,pp=2,zero=1"),
        ("adam", "dp=2,zero=2", "dp=1,zero=0"),
    ],
)
def test_a_run_continues_in_another_layout(name, before, after, tmp_path):
    groups = lambda engine: {
        "coordinates": engine.mesh.coordinates,
        "world": engine.mesh.group("world"),
    }

    def first(engine):
        train(engine, range(2))
        pieces = list(engine.optimizer.pieces())
        save(tmp_path, 2, pieces, run={}, limit=None, **groups(engine))
        return (
            engine.optimizer.extra_state(),
            {piece.kind for piece in pieces},
            train(engine, range(2, 4)),
        )

    def second(engine):
        load(tmp_path, 2, list(engine.optimizer.pieces()), kinds=None, **groups(engine))
        engine.optimizer.load_extra_state(numbers)
        engine.optimizer.after_load()
        return train(engine, range(2, 4))

    numbers, kinds, expected = run(name, before, first)[0]
    amsgrad = {"max_exp_avg_sq"} if name == "adam" else set()
    adam = (
        set(FACTS["adam"].state) if name == "muon" else set()
    )  # of what is not a matrix
    assert kinds == {"weight", *FACTS[name].state} | amsgrad | adam
    for losses in run(name, after, second):
        assert losses == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("name", FACTS)
def test_bytes_of_state_and_16_bit_weights_with_fp32_masters(name):
    def seen(engine):
        optimizer = engine.optimizer
        leaves = [leaf for s in optimizer.sets for leaf in s.leaves]
        before = [leaf.tensor.detach().clone() for leaf in leaves]
        train(engine, range(1))
        assert all(
            torch.equal(leaf.tensor.low, leaf.tensor.detach().bfloat16())
            for leaf in leaves
        )
        assert not any(
            torch.equal(leaf.tensor, old) for leaf, old in zip(leaves, before)
        )
        of = lambda matrices: sum(
            leaf.tensor.numel()
            for leaf in leaves
            if (name == "muon" and leaf.spec.matrices is not None) == matrices
        )
        return optimizer.memory().optimizer, of(False), of(True)

    tensors = 2 if name == "muon" else len(FACTS[name].state) + (name == "adam")
    layout = "dp=2,zero=0" if name == "zero_one_adam" else "dp=2,zero=1"
    for held, scalars, matrices in run(name, layout, seen, dtype="bf16"):
        assert held == 4 * tensors * scalars + 4 * matrices and (
            matrices > scalars / 4
        ) == (name == "muon")


@pytest.mark.parametrize(
    "name, layout, dtype",
    [
        ("lamb", "dp=2,zero=1,offload=cpu,sub_group=2048", "fp32"),
        (
            "lamb",
            f"tp=2,dp=2,zero=2,offload=nvme,nvme={tempfile.gettempdir()},sub_group=4096",
            "bf16",
        ),
        ("lamb", "dp=2,pp=2,zero=3,offload=cpu,ratio=0.5,offload_param=cpu", "fp32"),
    ],
)
def test_offloaded_parts_move_by_the_norms_of_whole_parameters(name, layout, dtype):
    """Sub-groups cut parameters; half of the state may stay on the device. Equal to state that stays."""
    away = "offload", "nvme", "sub_group", "ratio"
    stays = ",".join(word for word in layout.split(",") if not word.startswith(away))
    of = lambda where: run(
        name, where, lambda engine: (train(engine, range(FEW)), weights(engine)), dtype
    )
    for (losses, found), (expected, masters) in zip(of(layout), of(stays)):
        assert losses == pytest.approx(expected, rel=1e-7 if dtype == "fp32" else 1e-5)
        for key, master in masters.items():
            torch.testing.assert_close(found[key], master, rtol=1e-5, atol=1e-7)


def weights(engine):
    """The masters of this rank, by parameter: pieces joined."""
    pieces = sorted(
        (p.spec.name, p.start, p.tensor)
        for p in engine.optimizer.pieces()
        if p.kind == "weight"
    )
    names = dict.fromkeys(name for name, _, _ in pieces)
    return {
        name: torch.cat(
            [tensor.detach().view(-1) for of, _, tensor in pieces if of == name]
        )
        for name in names
    }


def test_an_optimizer_whose_step_has_no_halves_is_refused_with_offloading():
    class NeedsNorms:
        needs_norms = True

    with pytest.raises(
        ConfigError, match="needs whole tensors or norms of them, but offloaded"
    ):
        ZeroSettings(
            default_groups(NeedsNorms()), STAGES[1], offload=OffloadSettings("cpu")
        )


def test_offloaded_matrices_are_refused_before_the_run():
    request = parse_layout("dp=2,zero=1,offload=cpu", mbs="1")
    with pytest.raises(
        ConfigError, match="needs whole tensors or norms of them, but offloaded"
    ):
        parse(
            [*job_of("muon"), *request.flags], world_size=2, rules=(optimizer_problems,)
        )
