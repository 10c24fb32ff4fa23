"""Random jobs and layouts: features of a model, an optimizer and a layout, each drawn independently.

The grids of other tests cover all pairs of options of one part, such as schedules or context parallelism.
Random jobs combine options of all parts: attention sinks with ZeRO 3, for example.
"""

import random
from collections.abc import Iterator

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.planning.run_plan import optimizer_problems
from tests.harness.layout_comparison import parse_layout
from tests.harness.tiny_jobs import tiny_job

LAYERS, BATCH, STEPS, MOST_RANKS = (
    5,
    4,
    4,
    8,
)  # layers for two stages on each of four ranks

# What a model may have: (probability, flags).
FEATURES = [
    (0.15, "--window-size 3,0"),
    (0.1, "--position-embedding-type alibi"),
    (0.1, "--softmax-type learnable"),
    (0.1, "--softmax-type off-by-one"),
    (0.1, "--sparse-attention fixed --sparse-block 4"),
    (0.1, "--sparse-attention bigbird --sparse-block 4"),
    (0.15, "--qk-layernorm"),
    (0.1, "--apply-layernorm-1p"),
    (0.15, "--use-parallel-residual"),
    (0.1, "--add-qkv-bias"),
    (0.15, "--calculate-per-token-loss"),
    (0.1, "--label-smoothing 0.1"),
    (0.1, "--decoupled-lr 5e-4"),
    (0.1, "--param-group *norm*:lr_factor=0.5"),
    (0.1, "--kernels torch"),
    (
        0.1,
        "--random-ltd --random-ltd-layer-ids 1 --random-ltd-min-tokens 8 --random-ltd-max-tokens 16 "
        "--random-ltd-steps 3 --random-ltd-tokens-per-step 8",
    ),
]
EXPERTS = "--num-experts 4 --moe-router-topk 2"
# Capacities are left out: a token that is dropped by the last bit of its probability is another result.
FEATURES_OF_EXPERTS = [
    (0.4, "--moe-aux-loss-coeff 0.02"),
    (0.2, "--moe-z-loss-coeff 0.01"),
    (0.2, "--moe-layer-freq 2"),
    (0.2, "--moe-shared-expert-intermediate-size 32"),
    (0.2, "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
]
# Left out: 1-bit optimizers, whose result depends on the number of workers, and Lion, the sign of whose
# update is the sign of rounding where a gradient is nearly zero.
OPTIMIZERS = [
    "adam",
    "adam",
    "adam --amsgrad",
    "adagrad",
    "sgd",
    "muon",
    "lamb --lamb-min-coeff 0",
]


def random_jobs(seed: int) -> Iterator[tuple[list[str], str]]:
    """(flags of the job, layout) without end; only those that the rules of the configuration accept."""
    draw = random.Random(seed)
    while True:
        job, layout = _job(draw), _layout(draw)
        request = parse_layout(layout, mbs="1")
        try:
            config = parse([*job, *request.flags], world_size=request.world_size)
        except ConfigError:
            continue
        if not optimizer_problems(config):
            yield job, layout


def nth_job(seed: int) -> tuple[list[str], str]:
    """The first job and layout of a seed."""
    return next(random_jobs(seed))


def _job(draw: random.Random) -> list[str]:
    style = draw.choice(["gpt2", "llama", "llama", "bert"])
    is_bert = style == "bert"
    job = tiny_job(
        style,
        "fp32",
        draw.random() < 0.5,
        draw.choice([0.0, 0.0, 0.1]),
        LAYERS,
        BATCH,
        STEPS,
        "joined" if is_bert else draw.choice(["joined", "apart"]),
        "cut" if is_bert else draw.choice(["cut", "cut", "packed", "fim"]),
    )
    chosen = ["--optimizer " + draw.choice(OPTIMIZERS), *_some(draw, FEATURES)]
    if draw.random() < 0.3:
        chosen += [EXPERTS, *_some(draw, FEATURES_OF_EXPERTS)]
    return [*job, *" ".join(chosen).split()]


def _layout(draw: random.Random) -> str:
    sizes = {axis: draw.choice([1, 1, 2, 4]) for axis in ("tp", "pp", "dp", "cp")}
    while sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes["cp"] > MOST_RANKS:
        axis = draw.choice(list(sizes))
        sizes[axis] = max(1, sizes[axis] // 2)
    keys = {**sizes, "zero": draw.choice([0, 1, 2, 3]), "mbs": draw.choice([1, 1, 2])}
    options = {
        "comm_type": (sizes["cp"] > 1, ["p2p", "a2a", "all_gather"]),
        "sp": (sizes["tp"] > 1, [0, 1]),
        "ep": (sizes["dp"] * sizes["cp"] > 1, [1, 2]),
        "schedule": (
            sizes["pp"] > 1,
            ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"],
        ),
        "recompute": (True, ["none", "none", "selective", "full"]),
        "logits": (True, [1, 1, 2]),
        "tiles": (True, [1, 1, 2]),
        "offload": (keys["zero"] > 0, ["none", "none", "cpu"]),
        "hpz": (keys["zero"] == 3 and sizes["dp"] == 4, [1, 2]),
    }
    keys |= {
        key: draw.choice(values)
        for key, (is_possible, values) in options.items()
        if is_possible
    }
    return ",".join(
        f"{key}={value}" for key, value in keys.items() if (key, value) not in NOTHING
    )


NOTHING = {
    ("ep", 1),
    ("sp", 0),
    ("logits", 1),
    ("tiles", 1),
    ("hpz", 1),
    ("recompute", "none"),
    ("offload", "none"),
}


def _some(draw: random.Random, table: list[tuple[float, str]]) -> list[str]:
    return [flags for probability, flags in table if draw.random() < probability]
