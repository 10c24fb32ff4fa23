"""The feed-forward in tiles of the sequence, against the whole one; the layouts with tiles of both kinds
against one process without."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.models.block import MLP
from megatron_ds.models.sequence_tiles import in_tiles, number_of_tiles
from megatron_ds.mpu.group import coordinates_of, solo
from tests.harness.alive_bytes import AliveBytes
from tests.harness.gradients import accumulated, install
from tests.harness.layout_runs import GLOBAL_BATCH, stray
from tests.harness.model_runs import context_of
from tests.harness.plain_gpt import STYLES, TinyConfig
from tests.harness.shards import cut
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

pytestmark = pytest.mark.threads

S, B, FEW = 12, 3, 4
LAYOUTS = [(1, False), (2, False), (2, True), (3, True)]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config_of(style, **more) -> TinyConfig:
    return replace(
        STYLES[style],
        hidden_size=12,
        num_attention_heads=3,
        query_groups=3,
        ffn_size=18,
        **more,
    )


def gradients(
    config,
    group,
    tiles,
    *,
    sequence_parallel=False,
    main_grad=False,
    dtype=torch.float32,
    frozen=(),
):
    """(y, dx, the gradients of the parameters) of a rank, and how many tiles ran."""
    ctx = replace(
        context_of(group, sequence_parallel=sequence_parallel, dtype=dtype),
        mlp_tiles=tiles,
    )
    mlp = MLP(config, "mlp", ctx, output_std=0.1)
    for i, (name, p) in enumerate(mlp.named_parameters()):
        p.data.copy_(
            cut(0.3 * randn(*p.spec.shape, seed=i), p.spec, coordinates_of(group))
        )
        p.requires_grad_(name not in frozen)
        if main_grad and p.dim() == 2:
            p.ready = 0
            completed = lambda p=p: setattr(p, "ready", p.ready + 1)
            install(p, torch.ones(p.shape), completed)
    part = lambda t: t.chunk(group.size)[group.rank] if sequence_parallel else t
    x = (
        part(randn(S, B, 12, seed=8))
        .to(dtype)
        .clone()
        .requires_grad_("x" not in frozen)
    )
    lengths, of_tile = [], mlp.of_tile
    mlp.of_tile = lambda x: (lengths.append(len(x)), of_tile(x))[1]
    y = mlp(x, None)
    y.backward(part(randn(S, B, 12, seed=9)).to(dtype))
    assert not main_grad or {p.ready for p in mlp.parameters() if p.dim() == 2} == {1}
    assert not any(hasattr(p, "detour") for p in mlp.parameters())
    found = [accumulated(p) for p in mlp.parameters()]
    return [y.detach(), x.grad, *found], len(lengths)


@pytest.mark.parametrize("tiles", [2, 5, 100])
@pytest.mark.parametrize(
    "style, main_grad", [("gpt2", False), ("gpt2", True), ("llama", True)]
)
@pytest.mark.parametrize("t, sequence_parallel", LAYOUTS)
def test_tiles_give_the_output_and_gradients_of_the_whole_sequence(
    t, sequence_parallel, style, main_grad, tiles
):
    def main(rank, world):
        group = world.group("tp", tuple(range(t)), rank)
        options = {"sequence_parallel": sequence_parallel, "main_grad": main_grad}
        return [gradients(config_of(style), group, n, **options) for n in (tiles, 1)]

    length = S // t if sequence_parallel else S
    for (got, runs), (expected, once) in run_ranks(t, main):
        assert once == 1 and runs == 2 * -(-length // -(-length // min(tiles, length)))
        # Sums of the same terms in another order: a few roundings of fp32.
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=4e-6)


def test_in_bf16_the_sum_over_tiles_is_rounded_once():
    (tiled, _), (whole, _), (exact, _) = (
        gradients(config_of("gpt2"), solo("tp"), tiles, dtype=dtype)
        for tiles, dtype in (
            (12, torch.bfloat16),
            (1, torch.bfloat16),
            (1, torch.float32),
        )
    )
    for one, other, true in zip(tiled, whole, exact):
        error, usual = ((t.float() - true).abs().max() for t in (one, other))
        assert error <= 1.5 * usual


@pytest.mark.parametrize(
    "frozen", [("x",), ("linear_fc1.weight", "linear_fc2.bias"), ("linear_fc2.weight",)]
)
def test_what_is_frozen_gets_no_gradient_and_moves_no_other(frozen):
    tiled, whole = (
        gradients(config_of("gpt2"), solo("tp"), tiles, frozen=frozen)[0]
        for tiles in (4, 1)
    )
    assert [t is None for t in tiled] == [t is None for t in whole] and None in whole
    torch.testing.assert_close(
        [t for t in tiled if t is not None],
        [t for t in whole if t is not None],
        rtol=2e-6,
        atol=4e-6,
    )


def test_the_number_of_tiles_is_that_of_the_paper_unless_given():
    assert [number_of_tiles(0, tokens, 4096) for tokens in (1, 4096, 4097, 131072)] == [
        1,
        1,
        2,
        32,
    ]
    assert number_of_tiles(5, 131072, 4096) == 5 and number_of_tiles(5, 3, 4096) == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_memory_is_that_of_one_tile(device):
    s, h, f, tiles = 1024, 16, 256, 8
    w1, w2 = (
        torch.zeros(*shape, device=device, requires_grad=True)
        for shape in ((f, h), (h, f))
    )
    x, dy = (
        torch.zeros(s, 1, h, device=device, requires_grad=grad)
        for grad in (True, False)
    )
    of_tile = lambda x: torch.nn.functional.relu(x @ w1.t()) @ w2.t()
    peaks = []
    for n in (1, tiles):
        x.grad = w1.grad = w2.grad = None
        with AliveBytes(peak=True) as alive:
            y = in_tiles(of_tile, x, [w1, w2], n)
            kept = alive.now()
            y.backward(dy)
        peaks.append(alive.peak)
        if n > 1:
            assert kept == 4 * s * h  # y alone
    wide, narrow, weights = 4 * s * f, 4 * s * h, 4 * 8 * f * h
    assert peaks[1] < 3 * wide / tiles + 4 * narrow + weights < peaks[0]


def runs_of_tiles(
    layout: str,
    style: str,
    dtype: str = "fp32",
    dropout: float = 0.1,
    options: str = "",
):
    """The run, after it was compared with one process that has no tiles; and how often tiles ran."""
    job = [
        *tiny_job(style, dtype, style == "llama", dropout, 4, GLOBAL_BATCH, FEW),
        *options.split(),
    ]
    found, run = stray(job, layout, FEW)
    assert found.is_within(TOLERANCE[dtype]), found
    return run, run.calls.count("tile")


@pytest.mark.parametrize("dropout, again", [(0.0, 0), (0.1, 1)])
def test_recomputed_blocks_compute_a_tile_twice_and_not_three_times(dropout, again):
    """Unless the dropout after it keeps a mask, as on CPUs: recomputation then goes on to that."""
    _, tiles = runs_of_tiles(
        "pp=2,dp=2,zero=3,recompute=full,tiles=4", "gpt2", dropout=dropout
    )
    assert tiles == (2 + again) * 4 * FEW * GLOBAL_BATCH * 4
