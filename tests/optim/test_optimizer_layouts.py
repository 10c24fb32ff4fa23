"""What every optimizer holds, offloads and saves; a run continues in another layout."""

import os
import tempfile

import pytest
import torch

from megatron_ds.config.optimizer_facts import FACTS
from megatron_ds.errors import ConfigError
from megatron_ds.optim import OptimizerTraits, default_groups
from megatron_ds.planning.run_plan import optimizer_problems
from megatron_ds.zero.offload_settings import OffloadSettings
from megatron_ds.zero.settings import STAGES, ZeroSettings
from tests.harness.engines import config_of, load_state, on_engines, save_state, train
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

FEW = 20 if os.environ.get("MEGATRON_DS_TEST_ALL") else 3
LAYERS = 2
FLAGS = {
    "lamb": ["--lamb-min-coeff", "0", "--lr", "1e-2", "--lr-warmup-iters", "0"],
    "adam": ["--amsgrad"],
    "lion": ["--weight-decay", "0.3"],
    "ademamix": "--ademamix-alpha-warmup 3 --ademamix-beta3-warmup 3".split(),
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


@pytest.mark.parametrize("layout", ["tp=2,pp=2,zero=2", "dp=2,zero=1,offload=cpu"])
def test_ademamix_trains_like_one_process(layout):
    difference, _ = stray(job_of("ademamix"), layout, FEW)
    assert difference.is_within(TOLERANCE["fp32"]), difference


# --------------------------------------------------------------------------------- checkpoints, bytes, dtypes
def run(name, layout, main, dtype="fp32"):
    """main(engine) on every rank."""
    return on_engines(config_of(job_of(name, dtype=dtype), layout), main)


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("lion", "dp=2,zero=1", "tp=2,zero=3"),
        ("ademamix", "tp=2,zero=2", "dp=2,zero=1,offload=cpu"),
        ("adagrad", "tp=2,zero=2", "dp=2,zero=1,offload=cpu"),
        ("lamb", "dp=2,zero=3", "tp=2,pp=2,zero=0"),
        ("muon", "dp=2,zero=3", "tp=2,pp=2,zero=1"),
        ("adam", "dp=2,zero=2", "dp=1,zero=0"),
    ],
)
def test_a_run_continues_in_another_layout(name, before, after, tmp_path):
    def first(engine):
        train(engine, range(2))
        numbers = save_state(engine, tmp_path, 2)
        kinds = {piece.kind for piece in engine.optimizer.pieces()}
        return numbers, kinds, train(engine, range(2, 4))

    def second(engine):
        load_state(engine, tmp_path, 2, numbers)
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
        traits = OptimizerTraits(needs_norms=True)

    with pytest.raises(
        ConfigError, match="needs whole tensors or norms of them, but offloaded"
    ):
        ZeroSettings(
            default_groups(NeedsNorms()), STAGES[1], offload=OffloadSettings("cpu")
        )


def test_offloaded_matrices_are_refused_before_the_run():
    with pytest.raises(
        ConfigError, match="needs whole tensors or norms of them, but offloaded"
    ):
        config_of(job_of("muon"), "dp=2,zero=1,offload=cpu", (optimizer_problems,))
