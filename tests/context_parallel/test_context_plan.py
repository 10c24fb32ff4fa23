"""Context parallelism in plans: bytes against real ranks and against closed forms, memory and FLOPs against
those of one rank, and what a dry run says of them."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ds.config import RunConfig, parse
from megatron_ds.context_parallel.head_exchange import to_heads, to_tokens
from megatron_ds.extensions.dry_run.context_text import (
    attention_bytes,
    context_text,
    other_types,
)
from megatron_ds.extensions.dry_run.dry_run import flops_text, plan_text
from megatron_ds.extensions.dry_run.expert_text import flops_of_rank
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.kernels.cpu import compiled_attention
from megatron_ds.models import MODELS
from megatron_ds.models.attention import Core, SelfAttention
from megatron_ds.mpu.context import ParallelContext, SequenceSlice
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import VOCAB
from tests.planning.test_rank_plan import run

pytestmark = [pytest.mark.threads, pytest.mark.one_in(6)]

S = 32
B = 2
N = 8
D = 4
MICROBATCHES = 2
OF_KIND = {
    "p2p": ("send",),
    "all_gather": ("all_gather", "reduce_scatter"),
    "a2a": ("all_to_all",),
}


def job(
    *flags: object,
    ranks: int = 1,
    size: int | None = None,
    kinds: str = "p2p",
    layers: int = 3,
):
    """size: context-parallel ranks; None: all."""
    return parse(
        [
            *(
                f"--num-layers {layers} --hidden-size {N * D} --num-attention-heads {N} --seq-length {S} "
                f"--vocab-size {VOCAB} --make-vocab-size-divisible-by 8 --micro-batch-size {B} "
                f"--global-batch-size {B * MICROBATCHES} --lr 1e-3 --train-iters 4 --num-workers 0 "
                "--mock-data --hidden-dropout 0 --attention-dropout 0"
            ).split(),
            "--context-parallel-size",
            str(size or ranks),
            "--cp-comm-type",
            *kinds.split(),
            *map(str, flags),
        ],
        world_size=ranks,
    )


def closed_form(kind: str, c: int, g: int, e: int) -> int:
    """Bytes that a rank sends for one block and micro-batch: blocks of keys and values forward, the same and
    gradients of them in fp32 backward; or q, k, v and the output, each way, of max(g, c) heads of keys."""
    if kind == "a2a":
        return 2 * (S // c * B * D * (2 * N + 2 * max(g, c)) * e * (c - 1) // c)
    block = 2 * (S // c) * B * g * D
    return (c - 1) * (2 * block * e + block * 4)


@pytest.mark.parametrize(
    "groups, dtype, itemsize", [(N, [], 4), (2, ["--bf16"], 2)], ids=["all", "grouped"]
)
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.all)])
def test_ring_gather_and_ulysses_send_what_the_closed_forms_and_the_plan_say(
    ranks, groups, dtype, itemsize
):
    """A block for each comm type; the operations that a rank counts show which type sent them."""
    kinds = list(OF_KIND)
    config = job(
        "--num-query-groups", groups, *dtype, ranks=ranks, kinds=" ".join(kinds)
    )
    plans = [plan_world(config, rank, "cpu").rank_plan(rank) for rank in (0, ranks - 1)]
    counted = [traffic for traffic, _ in run(config)]
    for traffic, plan in ((counted[0], plans[0]), (counted[-1], plans[1])):
        assert dict(traffic.bytes) == {
            key: 2 * count for key, count in plan.traffic.bytes.items()
        }
        wire = traffic.wire_bytes()
        for kind in kinds:
            sent = sum(wire[operation, "cp", ranks] for operation in OF_KIND[kind])
            assert sent == 2 * MICROBATCHES * closed_form(
                kind, ranks, groups, itemsize
            ), kind


LARGE = (
    "--bf16",
    "--hidden-size",
    4096,
    "--seq-length",
    4096,
    "--num-attention-heads",
    32,
    "--micro-batch-size",
    1,
    "--global-batch-size",
    1,
)


@pytest.mark.parametrize(
    "kind, groups, c, forward, backward",
    [
        ("p2p", 8, 8, 14_680_064, 3 * 14_680_064),
        ("all_gather", 8, 4, 12_582_912, 3 * 12_582_912),
        ("a2a", 8, 2, 20_971_520, 20_971_520),
        ("a2a", 4, 8, 9_175_040, 9_175_040),
    ],
)
def test_a_block_of_4096_tokens_sends_known_bytes(kind, groups, c, forward, backward):
    """32 heads of 128 channels in bf16. Backward of a ring sends blocks again, and fp32 gradients of them."""
    planned = lambda *flags: plan_world(
        job(
            "--num-query-groups", groups, *LARGE, *flags, ranks=c, kinds=kind, layers=1
        ),
        0,
        "cuda",
    )
    kept, again = planned(), planned("--recompute-granularity", "full")
    assert attention_bytes(kept) == forward + backward
    assert attention_bytes(again) == 2 * forward + backward
    for plan in (kept, again):
        wire = plan.rank_plan(0).traffic.wire_bytes()
        assert attention_bytes(plan) == sum(
            wire.get((op, "cp", c), 0) for op in OF_KIND[kind]
        )


SELECTIVE = ["--recompute-granularity", "selective"]
ONE_LAYER = ["--recompute-granularity", "full", "--recompute-num-layers", 1]


@pytest.mark.parametrize(
    "channels, flags",
    [
        (D, []),
        (32, []),
        (D, SELECTIVE),
        (32, ONE_LAYER),
        pytest.param(32, SELECTIVE, marks=pytest.mark.all),
        pytest.param(D, ONE_LAYER, marks=pytest.mark.all),
    ],
    ids=str,
)
def test_what_attention_is_said_to_send_is_what_is_planned_between_context_ranks(
    channels, flags
):
    """Two stages, whose blocks share attention in different ways; compiled attention takes 32 channels."""
    config = job(
        *flags,
        "--kv-channels",
        channels,
        "--pipeline-model-parallel-size",
        2,
        "--num-query-groups",
        2,
        "--hidden-dropout",
        0.1,
        ranks=4,
        size=2,
        kinds="all_gather p2p p2p a2a",
        layers=4,
    )
    for rank in (0, 3):
        plan = plan_world(config, rank, "cpu")
        traffic = plan.rank_plan(rank).traffic.wire_bytes()
        assert (
            attention_bytes(plan)
            == sum(n for (_, axes, _), n in traffic.items() if axes == "cp")
            > 0
        )


def test_a_dry_run_says_which_way_is_cheaper_and_which_are_not_possible():
    """The bytes are those of any device; plans for GPUs are made in the least time."""
    says = lambda **more: list(context_text(plan_world(job(**more), 0, "cuda")))
    assert says(ranks=4)[:2] == [
        "context: each of 4 ranks holds 8 of the 32 tokens of a sequence, in two chunks",
        "  attention of rank 0 sends in a step 216.0 KiB by p2p (chosen), 216.0 KiB by all_gather, 72.00 KiB "
        "by a2a, 120.0 KiB by a2a+p2p 2 × 2",
    ]
    assert (
        says(ranks=4)[2]
        == "  least by --cp-comm-type a2a: 144.0 KiB less than p2p, 66.7%"
    )
    chosen, indivisible = says(ranks=4, kinds="a2a"), says(ranks=16)
    assert chosen[0].endswith("in one run")
    assert chosen[2] == "  least by a2a: 144.0 KiB less than the most, 66.7%"
    assert indivisible[1].endswith(
        "39.00 KiB by a2a+p2p 8 × 2, a2a cannot divide this number of heads"
    )
    assert indivisible[2] == (
        "  least by --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 2: "
        "231.0 KiB less than p2p, 85.6%"
    )
    assert says(ranks=2)[1].endswith(" by a2a") and says(ranks=1) == []
    layers = says(ranks=2, kinds="a2a all_gather a2a", layers=3)
    assert "KiB by a2a in 2 layers and all_gather in 1 (chosen), " in layers[1]
    assert " less than the chosen types, " in layers[2]


@pytest.mark.parametrize(
    "inner, outer", [(2, 2), pytest.param(4, 2, marks=pytest.mark.all)]
)
def test_the_alternative_of_two_levels_sends_what_a_run_with_it_sends(inner, outer):
    """Chosen, it is compared with the others: its division is of no use to them."""
    c = inner * outer
    config = job(
        "--hierarchical-context-parallel-sizes", inner, outer, ranks=c, kinds="a2a+p2p"
    )
    plan, ring = plan_world(config, 0, "cpu"), job(ranks=c)
    traffic = plan.rank_plan(0).traffic.wire_bytes()
    of_cp = sum(
        count for (_, axes, _), count in traffic.items() if axes.startswith("cp")
    )
    other = other_types(ring)[f"a2a+p2p {inner} × {outer}"]
    assert (
        attention_bytes(plan_world(ring, 0, "cpu"), other)
        == attention_bytes(plan)
        == of_cp
    )
    assert all(
        isinstance(other_types(config)[kind], RunConfig)
        for kind in ("p2p", "all_gather", "a2a")
    )


def test_the_grid_has_context_ranks_and_the_text_all_parts():
    config = job("--tensor-model-parallel-size", 2, ranks=8, size=2)
    text = plan_text(plan_world(config, 6, "cpu"), [])
    assert "8 ranks = tensor 2 × context 2 × pipeline 1 × data 2" in text
    assert "rank 6 is tp 0, cp 1, pp 0, dp 1" in text
    assert "\n  context (cp) " in text and "\ncontext: " in text
    assert "dp 0 cp 1  dp 1 cp 0" in text and "[6, 7]" in text and "[4, 5]" not in text


def test_context_ranks_divide_the_flops_of_a_step_and_not_its_tokens():
    one, four = (plan_world(job(ranks=ranks), 0, "cpu") for ranks in (1, 4))
    of_one, of_four = (list(flops_text(plan)) for plan in (one, four))
    assert (
        of_one[0]
        == of_four[0]
        == f"FLOPs of a step: {S * B * MICROBATCHES} tokens in 4 sequences"
    )
    *same, rank_of_one, unit = of_one[2].split()
    *same_of_four, rank_of_four, _ = of_four[2].split()
    assert same == same_of_four and unit == "MFLOP"
    assert float(rank_of_four) == pytest.approx(float(rank_of_one) / 4, rel=1e-3)
    layers = [layer for stage in one.stages for layer in stage.layers]
    assert flops_of_rank(four, layers) == flops_of_rank(one, layers) / 4


def test_a_part_of_a_sequence_that_is_one_tile_is_not_computed_again():
    """Tiles have as many tokens as the hidden size."""
    flags = ["--tiled-mlp", "--hidden-size", S // 2]
    one, two = (
        plan_world(job(*flags, ranks=ranks), 0, "cpu").stages[0].layers
        for ranks in (1, 2)
    )
    again = lambda layers: {
        layer.flops(S, VOCAB).again for layer in layers if layer.is_block
    }
    assert min(again(one)) > 0 and again(two) == {0.0}


COMPILED = pytest.mark.skipif(
    compiled_attention.reason_against(torch.float32) != "",
    reason="no compiled attention on this machine",
)


LONG = 16_384  # memory that threads have does not count


def long_plan(kind, heads):
    """The plan of one of two ranks, and the bytes of the output of its attention."""
    hidden = 64
    flags = (
        "--seq-length",
        LONG,
        "--hidden-size",
        hidden,
        "--ffn-hidden-size",
        16,
        "--num-attention-heads",
        heads,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        1,
        "--position-embedding-type",
        "rope",
    )
    plan = plan_world(job(*flags, ranks=2, kinds=kind, layers=2), 0, "cpu").rank_plan(0)
    return plan, LONG // 2 * hidden * 4


@pytest.mark.parametrize(
    "heads, again",
    [(4, 1), pytest.param(2, 0, marks=COMPILED)],
    ids=["torch", "compiled"],
)
def test_heads_over_all_tokens_need_no_more_memory_than_a_ring_but_for_a_second_output(
    heads, again
):
    """Torch's attention keeps its output in the order of heads, and the projection in that of tokens; the
    compiled one takes heads of 32 channels and keeps what the projection keeps. A rank works with no more
    than in a ring, but for numbers of each row and memory of its threads."""
    (ring, output), (ulysses, _) = (long_plan(kind, heads) for kind in ("p2p", "a2a"))
    assert ulysses.kept <= ring.kept + 2 * again * output
    assert ulysses.at_work <= ring.at_work + output // 16


@COMPILED
@pytest.mark.parametrize("kind, outputs", [("p2p", 5), ("all_gather", 8)])
def test_gradients_of_blocks_are_added_where_they_are_sent_from(kind, outputs):
    """Without the memory of dq, dk and dv of a tile, and of a block that is not needed any more: 3 and 4
    outputs."""
    plan, output = long_plan(kind, 2)
    assert plan.at_work < outputs * output


@COMPILED
def test_the_compiled_attention_sends_d_of_each_row_in_addition():
    """4 bytes for each row of a query head, in backward; the run sends what the plan counts."""
    config = job("--hidden-size", 32 * N, ranks=2, kinds="a2a")
    ((traffic, _), *_), plan = run(config), plan_world(config, 0, "cpu").rank_plan(0)
    assert dict(traffic.bytes) == {
        key: 2 * count for key, count in plan.traffic.bytes.items()
    }
    of_attention = 32 // D * closed_form("a2a", 2, N, 4) + S // 2 * B * N * 4 // 2
    assert (
        traffic.wire_bytes()["all_to_all", "cp", 2]
        == 2 * MICROBATCHES * 3 * of_attention
    )


@COMPILED
def test_attention_that_is_computed_again_sends_its_output_once():
    """q, k, v twice forward and once backward, and the output once each way: no D."""
    config = job(
        "--hidden-size",
        32 * N,
        "--recompute-granularity",
        "selective",
        ranks=2,
        kinds="a2a",
    )
    traffic = plan_world(config, 0, "cpu").rank_plan(0).traffic.wire_bytes()
    of_one = S // 2 * B * N * 32 * 4 // 2
    assert traffic["all_to_all", "cp", 2] == MICROBATCHES * 3 * (3 * 3 + 2) * of_one


@pytest.mark.parametrize("zigzag", [False, True], ids=["runs", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_all_tokens_are_those_of_the_whole_sequence_and_return(zigzag, dtype):
    """Three tensors of different heads, by way of one buffer."""
    ranks, length = 2, 12
    whole = [torch.randn(length, 2, heads, 3).to(dtype) for heads in (6, 2, 4)]
    parts = [SequenceSlice.of(cp=(rank, ranks), zigzag=zigzag) for rank in range(ranks)]

    def main(rank, world):
        group = Mesh(Grid(cp=ranks), rank, world.connect, torch.device("cpu")).group(
            "cp"
        )
        where, order = parts[rank].index(length), parts[rank].order(length)
        mine = [t[where].requires_grad_() for t in whole]
        received = to_heads(tuple(mine), group, order)
        back = to_tokens(received[0], group, order)
        gradients = torch.autograd.grad(received, mine, [2 * t for t in received])
        return received, back, gradients, mine

    for rank, (received, back, gradients, mine) in enumerate(run_ranks(ranks, main)):
        for t, found, gradient, own in zip(
            whole, received, gradients, mine, strict=True
        ):
            assert torch.equal(found, t.chunk(ranks, 2)[rank]) and torch.equal(
                gradient, 2 * own
            )
        assert torch.equal(back, mine[0])


def test_what_a_projection_returned_is_free_during_attention_unless_the_core_keeps_it():
    alive = []

    class Doubling(Core):
        def arrange(self, q, k, v, batch):
            self.given = [StorageWeakRef(t.untyped_storage()) for t in (q, k, v)]
            return 2 * q, 2 * k, 2 * v

        def forward(self, q, k, v, batch):
            alive.append([not storage.expired() for storage in self.given])
            return (q + k + v).flatten(2)

    config = job().model
    batch = MODELS["gpt"].data.blank(B, S, "cpu")
    attention = SelfAttention(
        config, "attention", ParallelContext(), output_std=0.02, core=Doubling()
    )
    torch.nn.init.normal_(attention.linear_qkv.weight)
    attention(torch.randn(S, B, N * D, requires_grad=True), batch)
    assert alive == [[False] * 3]
