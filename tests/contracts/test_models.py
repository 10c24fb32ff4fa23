"""What every registered model promises: the layout, recomputation and checkpoints change nothing.

The contracts run over `MODELS`, so a model is tested by being registered. The last tests register models
themselves: a sound one keeps all contracts, and each contract is broken by a model made for it.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from megatron_ds.checkpoint.save import save
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError, LayoutError
from megatron_ds.models import MODELS, build_stage, gpt_layers, language_model
from megatron_ds.models.attention import SelfAttention
from megatron_ds.models.block import MLP, make_norm, output_std
from megatron_ds.models.layer import recompute
from megatron_ds.mpu.context import ParallelContext, Recompute
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh
from tests.harness.layout_comparison import merge, mock_samples, train_layout
from tests.harness.layout_runs import GLOBAL_BATCH, run_layout, stray
from tests.harness.stored_weights import load_weights
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE
from tests.planning.test_activations import kept

pytestmark = pytest.mark.one_in(2)

JOB = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 61 "
    f"--make-vocab-size-divisible-by 4 --global-batch-size {GLOBAL_BATCH} --train-iters 4 "
    "--lr 1e-1 --optimizer sgd --hidden-dropout 0.1 --attention-dropout 0.1 --mock-data"
).split()
STEPS, ALONE = 3, "tp=1,pp=1,dp=1"
BROKEN = AssertionError, LayoutError, CheckpointError


def job_of(name: str) -> list[str]:
    return [*JOB, "--model", name]


def same_under_tensor_parallelism(name, folder):
    for layout in ("tp=2", "tp=2,sp=1"):
        assert_near(name, layout)


def same_on_two_stages(name, folder):
    assert_near(name, "pp=2")


def same_with_recomputation(name, folder):
    """To the last bit."""
    (kept, kept_weights), *others = [
        run_layout(job_of(name), f"{ALONE}{how}", STEPS).merged
        for how in ("", ",recompute=full", ",recompute=selective")
    ]
    for trace, weights in others:
        assert trace.losses == kept.losses and trace.grad_norms == kept.grad_norms
        assert all(
            torch.equal(weights[parameter], w) for parameter, w in kept_weights.items()
        )


def same_after_save_and_load(name, folder):
    """Saved by two ranks that share the tensors, loaded into one whole model."""
    config = parse(
        [*job_of(name), "--micro-batch-size", "1", "--tensor-model-parallel-size", "2"],
        world_size=2,
    )
    samples = mock_samples(config, 2 * GLOBAL_BATCH, seed=1)

    def main(rank, world):
        engines, mesh = [], Mesh(config.grid(), rank, world.connect)
        trace = train_layout(config, mesh, 1, samples, watch=engines.append)
        save(
            folder,
            1,
            list(engines[0].optimizer.pieces()),
            coordinates=mesh.coordinates,
            world=mesh.group("world"),
            run={},
        )
        return trace

    _, weights = merge(run_ranks(2, main))
    modules = build_stage(MODELS[name](config.model, ParallelContext()))
    for parameter in modules.parameters():
        nn.init.constant_(parameter, 7.0)
    load_weights(folder, 1, list(modules.parameters()), tp=solo("tp"))
    named = {p.spec.name: p for p in modules.parameters()}
    assert named.keys() == weights.keys()
    for parameter_name, parameter in named.items():
        for box in parameter.spec.boxes({}):
            held = parameter[
                tuple(slice(a, a + n) for a, n in zip(box.local, box.sizes))
            ]
            assert torch.equal(held, weights[parameter_name]), parameter_name


def keeps_the_planned_bytes(name, folder):
    """The first stage of two tensor-parallel ranks, and the last."""
    for layers in (slice(0, 3), slice(2, 6)):
        measured, _, planned = kept(
            ["--model", name, "--seq-length", "24", "--micro-batch-size", "2"],
            2,
            layers,
        )
        assert measured == planned, (
            f"layers {layers}: {measured} bytes kept, {planned} planned"
        )


CONTRACTS = (
    same_under_tensor_parallelism,
    same_on_two_stages,
    same_with_recomputation,
    same_after_save_and_load,
    keeps_the_planned_bytes,
)


def assert_near(name, layout):
    """Summing in another order changes the last bits only; SGD does not enlarge what is left of a gradient
    near zero."""
    difference, _ = stray(job_of(name), layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), f"{layout}: {difference}"


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("name", MODELS.names())
def test_every_model_keeps_the_contract(name, contract, tmp_path):
    contract(name, tmp_path)


# Models that the tests register.


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), as GPT-J's blocks."""

    def __init__(self, config, name, ctx):
        super().__init__()
        std = output_std(config)
        self.norm = make_norm(config, f"{name}.norm", ctx)
        self.attention = SelfAttention(config, f"{name}.attention", ctx, output_std=std)
        self.mlp = MLP(config, f"{name}.mlp", ctx, output_std=std)
        self.set_recompute(ctx.recompute.granularity)

    def set_recompute(self, granularity):
        self.granularity = granularity
        self.attention.recompute_core = granularity == "selective"

    def forward(self, x, batch):
        return (
            recompute(self.run, x, batch)
            if self.granularity == "full"
            else self.run(x, batch)
        )

    def run(self, x, batch):
        normed = self.norm(x)
        return x + self.attention(normed, batch) + self.mlp(normed, batch)


class DiffersByRank(ParallelBlock):
    def __init__(self, config, name, ctx):
        super().__init__(config, name, ctx)
        self.factor = 1.0 + 0.1 * ctx.tp.size

    def run(self, x, batch):
        return super().run(x, batch) * self.factor


class DrawsUnkeyed(ParallelBlock):
    def run(self, x, batch):
        return super().run(x, batch) + torch.rand(())


class SharesAName(ParallelBlock):
    """All blocks name their parameters alike, so that a checkpoint holds one of them."""

    def __init__(self, config, name, ctx):
        super().__init__(config, "decoder.layers.0", ctx)


class NamesItsRanks(ParallelBlock):
    """Names of parameters depend on the number of ranks."""

    def __init__(self, config, name, ctx):
        super().__init__(config, f"{name}.of{ctx.tp.size}", ctx)


class KnowsItsStage(ParallelBlock):
    """place: among the blocks of its rank, set by `layers_of`."""

    def run(self, x, batch):
        return super().run(x, batch) * self.place


def layers_of(block):
    def layers(config, ctx):
        built = [0]

        def make(name):
            built[0] += 1
            module = block(config, name, ctx)
            module.place = built[0]
            return module

        return [
            replace(layer, make=partial(make, layer.name), recompute=Recompute())
            if layer.is_block
            else layer
            for layer in gpt_layers(config, ctx)
        ]

    return layers


@contextmanager
def registered(block):
    name = f"made-of-{block.__name__}"
    MODELS.register(name)(language_model(layers_of(block)))
    try:
        yield name
    finally:
        del MODELS._things[name]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_a_new_model_is_covered_by_being_registered(contract, tmp_path):
    with registered(ParallelBlock) as name:
        assert name in MODELS.names()
        contract(name, tmp_path)


@pytest.mark.parametrize(
    "block, contract",
    [
        (DiffersByRank, same_under_tensor_parallelism),
        (KnowsItsStage, same_on_two_stages),
        (DrawsUnkeyed, same_with_recomputation),
        (SharesAName, same_after_save_and_load),
        (NamesItsRanks, same_after_save_and_load),
    ],
    ids=lambda thing: thing.__name__,
)
def test_a_broken_model_fails(block, contract, tmp_path):
    with registered(block) as name, pytest.raises(BROKEN):
        contract(name, tmp_path)
