"""Context-parallel ranks gather latents where these are less than the keys and values of a rank's heads: bytes, plans
and FLOPs, and training as in one process."""

from dataclasses import replace

import pytest

from megatron_ds.config import parse
from megatron_ds.extensions.dry_run.context_text import attention_bytes
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.extensions.latent_attention import latent_mixer
from megatron_ds.extensions.latent_attention.latent_sizes import sends_latents
from tests.harness.latent_jobs import LATENT, RUN, SIZES, latent_config
from tests.harness.layout_runs import stray
from tests.harness.tiny_jobs import TOLERANCE, VOCAB
from tests.latent_attention.test_latent_layouts import ADAPTED, STEPS, job_of
from tests.planning.test_activations import kept
from tests.planning.test_rank_plan import run

WINDOW = ["--window-size", "9", "0"]
GATHERED = "comm_type=all_gather"
S = 32
H = 4
R = 16
E, P, V = 16, 8, 12  # of a head: without positions, rotated, of a value
LAYERS = 2
MICROBATCHES = 4
STEPS_COUNTED = 2


def job(*flags: str, ranks: int, kind: str = "all_gather", size: int | None = None):
    """size: context-parallel ranks; None: all"""
    of_ranks = ["--context-parallel-size", str(size or ranks), "--cp-comm-type", kind]
    at = SIZES.index("--vocab-size")
    sizes = [*SIZES[:at], *SIZES[at + 2 :], "--vocab-size", str(VOCAB)]
    return parse(
        [*sizes, *LATENT, *RUN, "--num-workers", "0", *of_ranks, *flags],
        world_size=ranks,
    )


@pytest.mark.parametrize(
    "tp, cp, kind, expected",
    [
        (8, 2, "all_gather", True),
        (8, 2, "p2p", False),
        (8, 2, "a2a", False),
        (8, 1, "all_gather", False),
        # A head has 192 + 128 numbers, and the two parts 512 + 64.
        (64, 2, "all_gather", True),
        (128, 2, "all_gather", False),
    ],
)
def test_latents_travel_where_their_numbers_are_fewer(tp, cp, kind, expected):
    deepseek_v3 = replace(
        latent_config().model,
        num_attention_heads=128,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    )
    assert sends_latents(deepseek_v3, tp, cp, kind) is expected


def sent_by(config, cp: int) -> float:
    """Bytes that rank 0 gathers and reduces among context-parallel ranks in a step, after those of all ranks have been
    compared with the plan's."""
    ranks = config.world_size
    for rank, (traffic, _) in enumerate(run(config)):
        planned = plan_world(config, rank, "cpu").rank_plan(rank).traffic.bytes
        assert dict(traffic.bytes) == {
            key: STEPS_COUNTED * count for key, count in planned.items()
        }
        if rank == 0:
            wire = traffic.wire_bytes()
    assert ranks >= cp
    ways = ("all_gather", "reduce_scatter")
    return sum(wire[way, "cp", cp] for way in ways) / STEPS_COUNTED


def of_numbers(numbers: float, cp: int) -> float:
    """Bytes of a step for so many fp32 numbers of a token: gathered forward and backward, and their gradients."""
    return LAYERS * MICROBATCHES * (cp - 1) * (S // cp) * 3 * 4 * numbers


@pytest.mark.threads
@pytest.mark.parametrize(
    "flags, ranks, cp, numbers",
    [
        ([], 2, 2, R + P),
        pytest.param([], 4, 4, R + P, marks=pytest.mark.rest),
        pytest.param(
            ["--tensor-model-parallel-size", "2"], 4, 2, R + P, marks=pytest.mark.rest
        ),
        # Each tensor-parallel rank sends the latents of its own tokens.
        pytest.param(
            ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
            4,
            2,
            R / 2 + P,
            marks=pytest.mark.rest,
        ),
    ],
)
def test_what_is_sent_is_the_latents_and_the_rotated_part(flags, ranks, cp, numbers):
    assert sent_by(job(*flags, ranks=ranks, size=cp), cp) == of_numbers(numbers, cp)


@pytest.mark.threads
@pytest.mark.rest
def test_otherwise_keys_and_values_of_all_heads_would_travel(monkeypatch):
    monkeypatch.setattr(latent_mixer, "sends_latents", lambda *_: False)
    assert sent_by(job(ranks=2), 2) == of_numbers(H * (E + P + V), 2)


SELECTIVE = ["--recompute-granularity", "selective"]
FULL = ["--recompute-granularity", "full"]
SEQUENCE = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
OF_KEYS = ["--lora-rank", "2", "--lora-target-modules", "linear_kv_up_proj"]
OTHERS = ["--lora-rank", "2", "--lora-target-modules", "linear_q_down_proj"]


@pytest.mark.plan
@pytest.mark.parametrize(
    "flags", [[], SELECTIVE, FULL, SEQUENCE, OF_KEYS, OTHERS], ids=" ".join
)
def test_a_dry_run_counts_what_its_plan_sends(flags):
    """An adapter of the projection is of the tokens of its rank, so keys and values travel."""
    config = job(*flags, ranks=4, size=2)
    plan = plan_world(config, 1, "cpu")
    traffic = plan.rank_plan(1).traffic.wire_bytes()
    of_cp = sum(n for (_, axes, _), n in traffic.items() if axes == "cp")
    assert attention_bytes(plan) == of_cp > 0
    # The same, where it is one of the ways that a plan compares.
    ring = plan_world(job(*flags, ranks=4, size=2, kind="p2p"), 1, "cpu")
    assert attention_bytes(ring, config) == of_cp
    assert (attention_bytes(ring) == of_cp) is (flags == OF_KEYS)


@pytest.mark.plan
@pytest.mark.parametrize("recompute", [[], SELECTIVE, FULL], ids=" ".join)
@pytest.mark.parametrize("sequence", [[], SEQUENCE], ids=" ".join)
def test_the_plan_has_the_bytes_that_its_blocks_keep(recompute, sequence):
    """Less than with a ring, as keys and values are made again."""
    flags = [*LATENT, *recompute, *sequence, "--seq-length", "24"]
    cp = ["--context-parallel-size", "2", "--cp-comm-type"]
    number = 4 if sequence else 2
    of_kind = {}
    for kind in ("all_gather", "p2p"):
        measured, _, planned = kept(
            [*flags, *cp, kind, "--micro-batch-size", "2"], number, slice(1, 3)
        )
        assert measured == planned
        of_kind[kind] = planned
    assert (of_kind["all_gather"] < of_kind["p2p"]) is (recompute != FULL)


CASES = [
    ("dense", 0.0, f"cp=2,{GATHERED}", []),
    ("apart", 0.1, f"tp=2,sp=1,cp=2,{GATHERED}", []),
]
FURTHER = [
    ("dense", 0.1, f"cp=4,{GATHERED},zero=3,recompute=selective", []),
    ("yarn", 0.1, f"cp=4,{GATHERED},recompute=full", WINDOW),
    ("apart", 0.0, f"tp=2,sp=1,cp=2,{GATHERED},dp=2,zero=3,recompute=full", WINDOW),
    ("experts", 0.1, f"tp=2,sp=1,cp=2,{GATHERED},recompute=selective", []),
    ("apart", 0.1, f"cp=2,{GATHERED},pp=2,schedule=zb-h1", []),
    ("dense", 0.1, f"tp=2,sp=1,cp=2,{GATHERED},pp=2,schedule=zb-v,zero=1", []),
    ("plain queries", 0.1, f"tp=2,cp=2,{GATHERED},zero=2,offload=cpu", []),
    ("dense", 0.0, f"tp=2,sp=1,cp=2,{GATHERED}", [*ADAPTED, "--use-dora"]),
    ("dense", 0.1, f"tp=2,sp=1,cp=2,{GATHERED}", [*OTHERS, "linear_proj"]),
]


@pytest.mark.threads
@pytest.mark.parametrize(
    "model, dropout, layout, flags",
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.rest) for case in FURTHER),
    ],
)
def test_ranks_that_gather_latents_train_like_one_process(
    model, dropout, layout, flags
):
    difference, _ = stray([*job_of(model, dropout), *flags], layout, STEPS)
    assert difference.is_within(TOLERANCE["fp32"]), difference
