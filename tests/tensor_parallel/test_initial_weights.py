import itertools

import pytest
import torch

from megatron_ds.mpu.context import new_parameter
from megatron_ds.mpu.param_spec import Init, ParamSpec, Split
from megatron_ds.tensor_parallel import init
from megatron_ds.tensor_parallel.init import initialize, initialize_interval
from tests.harness.shards import assemble, cut

pytestmark = pytest.mark.plan

NORMAL = Init("normal", 0.5)


def draw(spec, rank=0, size=1, seed=7, dtype=torch.float32):
    parameter = new_parameter(spec, sizes={"tp": size}, dtype=dtype)
    parameter.data.fill_(torch.nan)
    initialize([parameter], seed, {"tp": (rank, size)})
    return parameter.detach()


SPECS = [
    ParamSpec("rows", (12, 7), NORMAL, (Split("tp", 0),)),
    ParamSpec("columns", (7, 12), NORMAL, (Split("tp", 1),)),
    ParamSpec("gated", (24, 5), NORMAL, (Split("tp", 0, parts=2),)),
    ParamSpec("vocabulary", (19, 5), NORMAL, (Split("tp", 0, padded=24),)),
    ParamSpec("replicated", (9, 5), NORMAL),
    ParamSpec("vector", (36,), NORMAL, (Split("tp", 0),)),
    ParamSpec("cube", (3, 12, 5), NORMAL, (Split("tp", 1),)),
]


@pytest.mark.parametrize("block", [4, 16, 1 << 16])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_shards_of_any_layout_are_cut_from_the_same_tensor(spec, block, monkeypatch):
    monkeypatch.setattr(
        init, "BLOCK", block
    )  # blocks that end inside rows, and rows longer than blocks
    whole = assemble([draw(spec)], spec)
    for size in (2, 3, 4):
        shards = [draw(spec, rank, size) for rank in range(size)]
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, cut(whole, spec, {"tp": (rank, size)}))


def test_the_values_are_those_of_the_blocks_in_order(monkeypatch):
    monkeypatch.setattr(init, "BLOCK", 16)
    spec = ParamSpec("w", (5, 9), NORMAL, (Split("tp", 0),))
    expected = torch.cat(
        [
            torch.empty(n).normal_(std=0.5, generator=init.generator_of(7, "w", i))
            for i, n in enumerate((16, 16, 13))
        ]
    )
    assert torch.equal(draw(spec).flatten(), expected)


def test_mean_and_deviation_are_as_asked():
    values = draw(ParamSpec("w", (700, 300), Init("normal", 0.02)))
    assert abs(values.mean().item()) < 5 * 0.02 / 210_000**0.5
    assert abs(values.std().item() / 0.02 - 1) < 0.01


def test_name_and_seed_change_the_values_and_nothing_else_does():
    one = draw(ParamSpec("a", (6, 8), NORMAL))
    assert not torch.equal(one, draw(ParamSpec("b", (6, 8), NORMAL)))
    assert not torch.equal(one, draw(ParamSpec("a", (6, 8), NORMAL), seed=8))
    torch.manual_seed(99)
    tied = ParamSpec(
        "a", (6, 8), NORMAL, (Split("tp", 1),), tied="embedding", tied_copy=True
    )
    assert torch.equal(one, draw(tied))


def test_low_precision_weights_are_the_rounded_ones():
    spec = ParamSpec("w", (12, 7), NORMAL, (Split("tp", 0),))
    assert torch.equal(
        draw(spec, 1, 2, dtype=torch.bfloat16), draw(spec, 1, 2).bfloat16()
    )


def test_zeros_and_ones_leave_padding_zero():
    ones = draw(
        ParamSpec("bias", (5,), Init("ones"), (Split("tp", 0, padded=8),)), 1, 2
    )
    assert ones.tolist() == [1, 0, 0, 0]
    assert draw(ParamSpec("bias", (5,), Init("zeros"))).tolist() == [0] * 5


def test_a_rank_draws_only_the_blocks_of_its_rows(monkeypatch):
    monkeypatch.setattr(init, "BLOCK", 16)
    drawn = []
    original = init.generator_of
    monkeypatch.setattr(
        init, "generator_of", lambda *key: (drawn.append(key[-1]), original(*key))[1]
    )
    draw(ParamSpec("w", (16, 8), NORMAL, (Split("tp", 0),)), rank=2, size=4)
    assert drawn == [4, 5]  # elements 64 .. 96 of 128


@pytest.mark.parametrize(
    "shape, dim, parts, padded",
    [
        ((13, 7), None, 1, None),
        ((13, 7), 0, 1, 24),
        ((24, 10), 1, 1, None),
        ((24, 10), 0, 2, None),
        ((29,), None, 1, None),
        ((6, 4, 10), 2, 1, None),
        ((300, 700), 0, 1, None),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "ones"])
def test_an_interval_of_a_shard_is_drawn_with_the_bits_of_the_whole(
    shape, dim, parts, padded, kind
):
    splits = () if dim is None else (Split("tp", dim, parts, padded),)
    check_intervals(
        ParamSpec("w", shape, Init(kind, 0.5), splits),
        [{"tp": at} for at in ((0, 1), (0, 2), (1, 2))],
    )


def check_intervals(spec, everywhere):
    for coordinates in everywhere:
        parameter = new_parameter(
            spec, sizes={axis: size for axis, (_, size) in coordinates.items()}
        )
        initialize([parameter], 7, coordinates)
        whole = parameter.detach().flatten()
        cuts = [0, 1, whole.numel() // 3, whole.numel() // 2 + 1, whole.numel()]
        for start, stop in zip(cuts, cuts[1:]):
            out = torch.full((stop - start,), torch.nan)
            initialize_interval(out, spec, start, 7, coordinates)
            assert torch.equal(out, whole[start:stop])


TWO_AXES = [  # stacked experts, split over "ep" and "tp"
    ParamSpec("up", (6, 12, 5), NORMAL, (Split("ep", 0), Split("tp", 1))),
    ParamSpec("gated", (6, 24, 5), NORMAL, (Split("ep", 0), Split("tp", 1, parts=2))),
    ParamSpec("down", (6, 5, 12), NORMAL, (Split("tp", 2), Split("ep", 0))),
    ParamSpec(
        "padded",
        (5, 7, 11),
        NORMAL,
        (Split("ep", 0, padded=6), Split("tp", 2, padded=12)),
    ),
    ParamSpec(
        "bias",
        (6, 24),
        Init("ones"),
        (Split("ep", 0, parts=2), Split("tp", 1, parts=3)),
    ),
]


def everywhere(ep, tp):
    return [
        {"ep": (e, ep), "tp": (t, tp)}
        for e, t in itertools.product(range(ep), range(tp))
    ]


@pytest.mark.parametrize("block", [7, 64, 1 << 16])
@pytest.mark.parametrize("spec", TWO_AXES, ids=lambda s: s.name)
def test_shards_over_two_axes_are_slices_of_the_whole(spec, block, monkeypatch):
    monkeypatch.setattr(init, "BLOCK", block)
    whole = assemble([draw(spec)], spec)
    assert not whole.isnan().any()
    for coordinates in everywhere(3, 2) + everywhere(1, 4) + everywhere(3, 1):
        sizes = {axis: size for axis, (_, size) in coordinates.items()}
        parameter = new_parameter(spec, sizes=sizes)
        parameter.data.fill_(torch.nan)
        initialize([parameter], 7, coordinates)
        assert torch.equal(parameter.detach(), cut(whole, spec, coordinates))
    check_intervals(spec, everywhere(3, 2))


def test_without_parts_and_padding_a_shard_over_two_axes_is_a_rectangle_of_the_whole():
    spec = TWO_AXES[0]
    whole, parameter = draw(spec), new_parameter(spec, sizes={"ep": 3, "tp": 2})
    initialize([parameter], 7, {"ep": (1, 3), "tp": (1, 2)})
    assert torch.equal(parameter.detach(), whole[2:4, 6:12])
