"""The longest sequence that fits: on known functions, on plans, and the memory of tiles that it rests on."""

from types import SimpleNamespace

import pytest

from megatron_ds.config import parse
from megatron_ds.config.parse import read
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run import find_longest_sequence as longest_sequence
from megatron_ds.extensions.dry_run import longest_sequence as planning
from megatron_ds.extensions.dry_run.longest_sequence import (
    bytes_of,
    length_range,
    length_unit,
    longest,
    without_length,
)
from megatron_ds.extensions.dry_run.world_plan import plan_world, recomputed_flops
from megatron_ds.mpu.fake_group import fake_mesh
from megatron_ds.mpu.grid import Grid
from megatron_ds.planning.run_model import describe_layers
from tests.planning.test_activations import JOB, RANKS, STYLES, kept

pytestmark = pytest.mark.plan

PEAKS = {
    "line": lambda n: 5000 + 37 * n,
    "square": lambda n: n * n // 7,
    "steps": lambda n: n // 1000 * 9000,
    "flat, then steep": lambda n: 10 if n < 5000 else n**3,
}


@pytest.mark.parametrize("unit", [1, 3, 128])
@pytest.mark.parametrize("memory", [99_999, 1_000_003, 7_654_321_000])
@pytest.mark.parametrize("name", PEAKS)
def test_the_longest_length_fits_and_the_next_one_does_not(name, memory, unit):
    calls = []
    peak_of = lambda n: (calls.append(n), PEAKS[name](n))[1]
    found = longest(peak_of, memory, unit)
    assert (
        found.length % unit == 0 and found.peak == PEAKS[name](found.length) <= memory
    )
    assert found.beyond == PEAKS[name](found.length + unit) > memory
    assert len(calls) == len(set(calls)) <= (34 if name == "line" else 70)


def test_nothing_fits_or_everything_does():
    assert longest(lambda n: 100 + n, memory=90) is None
    found = longest(lambda n: n, memory=10**9, unit=4, most=4099)
    assert (found.length, found.peak, found.beyond) == (4096, 4096, None)


@pytest.mark.parametrize(
    "least, most, memory, length",
    [
        (2100, 9000, 5000, 4998),
        (2100, 9000, 2102, 2100),
        (2100, 9000, 2099, None),
        (7, 777, 10**9, 777),
        (7, 777, 300, 294),
        (2101, 2101, 10**9, 2107),
    ],
)
def test_lengths_outside_of_the_range_are_not_planned(least, most, memory, length):
    calls = []
    found = longest(lambda n: (calls.append(n), n)[1], memory, 7, most, least)
    assert (found and found.length) == length
    assert min(calls) >= least and max(calls) <= max(most, -(-least // 7) * 7)


@pytest.mark.parametrize(
    "flags, ranks, multiple_of, unit",
    [
        ("", 1, 1, 1),
        ("", 1, 128, 128),
        ("--tensor-model-parallel-size 3", 3, 1, 1),
        ("--tensor-model-parallel-size 3 --sequence-parallel", 3, 1, 3),
        ("--tensor-model-parallel-size 6 --sequence-parallel", 6, 4, 12),
        ("--sparse-attention fixed --sparse-block 32", 1, 1, 32),
        ("--sparse-attention dense", 1, 24, 48),
        (
            "--context-parallel-size 3 --sparse-attention local --sparse-block 4",
            3,
            1,
            12,
        ),
        ("--context-parallel-size 3 --cp-comm-type a2a", 3, 1, 3),
        ("--context-parallel-size 4", 4, 1, 8),
    ],
)
def test_lengths_are_those_that_the_layout_divides(flags, ranks, multiple_of, unit):
    job = [
        *JOB[:2],
        *"--hidden-size 48 --num-attention-heads 12".split(),
        *JOB[6:],
        *flags.split(),
    ]
    config = parse(
        [*job, "--seq-length", "96", "--micro-batch-size", "1"], world_size=ranks
    )
    assert length_unit(config, multiple_of) == unit
    for length in range(1, 97):
        if length % length_unit(config):
            with pytest.raises(
                ConfigError, match=f"--seq-length {length} is not a multiple"
            ):
                parse(
                    [*job, "--seq-length", str(length), "--micro-batch-size", "1"],
                    world_size=ranks,
                )


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", (96, 1 << 30)),
        ("--max-position-embeddings 777", (96, 777)),
        (
            "--sparse-attention bslongformer --sparse-global-block-indices 0 20",
            (384, 1 << 30),
        ),
        ("--sparse-attention fixed --sparse-block 64", (96, 1 << 30)),
        ("--original-max-position-embeddings 500", (576, 1 << 30)),
        (
            "--original-max-position-embeddings 500 --max-position-embeddings 600",
            (96, 600),
        ),
        ("--random-ltd --random-ltd-min-tokens 97", (192, 1 << 30)),
        ("--curriculum-max-length 96", (96, 1 << 30)),
    ],
)
def test_options_limit_the_lengths_from_which_the_search_starts(flags, expected):
    assert length_range(read([*JOB, *flags.split()]), 96) == expected


def test_sizes_and_flags_are_read():
    assert [bytes_of(text) for text in ("4GiB", "1.5 MiB", "80e9", "512KiB")] == [
        4 << 30,
        3 << 19,
        80 * 10**9,
        1 << 19,
    ]
    assert [bytes_of(text) for text in ("4GB", "1.5 MB", "3kB", "1TB")] == [
        4 * 10**9,
        1_500_000,
        3000,
        10**12,
    ]
    for wrong in ("4XB", "GiB", "much", "4 G"):
        with pytest.raises(ConfigError, match="is not a size"):
            bytes_of(wrong)
    assert (
        without_length("--a 1 --seq-length 8 --b --seq_length=9 c".split())
        == "--a 1 --b c".split()
    )


def test_the_tool_prints_a_length_that_the_layout_divides_and_whose_plan_fits(
    monkeypatch, capsys
):
    flags = [
        *JOB,
        *(
            "--seq-length 64 --micro-batch-size 1 --position-embedding-type rope --world-size 3 "
            "--sequence-parallel --tensor-model-parallel-size 3 --num-query-groups 12 "
            "--num-attention-heads 12 --hidden-size 48"
        ).split(),
    ]
    flags = [
        word for i, word in enumerate(flags) if i not in (2, 3, 4, 5)
    ]  # sizes of JOB
    planned = []

    def plan_world(config, rank, device):
        planned.append((config.model.seq_length, config.world_size, device))
        return SimpleNamespace(
            worst=SimpleNamespace(peak=(5 << 20) + 1000 * config.model.seq_length)
        )

    monkeypatch.setattr(planning, "plan_world", plan_world)
    monkeypatch.setattr(
        "sys.argv",
        [
            *"longest_sequence.py --memory 20MiB --libraries 2MiB --multiple-of 64".split(),
            *flags,
        ],
    )
    assert longest_sequence.main() == 0
    [line, *_] = capsys.readouterr().out.splitlines()
    limit = 18 << 20
    most = max(n for n in range(0, 20000, 192) if (5 << 20) + 1000 * n <= limit)
    assert line == f"longest sequence: {most:,} tokens, a multiple of 192"
    assert {(ranks, device) for _, ranks, device in planned} == {(3, "cpu")}
    assert all(length % 192 == 0 for length, *_ in planned)


@pytest.mark.parametrize(
    "flags, unit, least",
    [
        ("--sparse-attention fixed --sparse-block 256", 256, 256),
        (
            "--sparse-attention local --sparse-block 48 --context-parallel-size 8 --world-size 8",
            384,
            384,
        ),
        ("--sparse-attention variable --sparse-global-block-indices 0 20", 128, 384),
    ],
)
def test_the_tool_asks_for_no_length_that_sparse_blocks_do_not_divide(
    flags, unit, least, monkeypatch, capsys
):
    plan_world = lambda config, *_: SimpleNamespace(
        worst=SimpleNamespace(peak=1000 * config.model.seq_length)
    )
    monkeypatch.setattr(planning, "plan_world", plan_world)
    for memory, said in (
        (
            "5MB",
            f"longest sequence: {4_999_999 // 1000 // unit * unit:,} tokens, a "
            f"multiple of {unit}",
        ),
        ("1kB", f"not even {least} tokens fit in 1kB"),
    ):
        monkeypatch.setattr(
            "sys.argv",
            [
                "longest_sequence.py",
                "--memory",
                memory,
                "--libraries",
                "0",
                *JOB,
                *"--micro-batch-size 1 --position-embedding-type rope".split(),
                *flags.split(),
            ],
        )
        longest_sequence.main()
        assert capsys.readouterr().out.splitlines()[0] == said


# ------------------------------------------------------------------ memory and FLOPs of tiles
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("style", ["gpt", "llama", "bert"])
def test_blocks_with_tiles_keep_as_planned_less_than_without_by_what_the_feed_forward_keeps(
    style, ranks
):
    size, flags = RANKS[ranks]
    job = [
        *STYLES[style],
        *flags,
        *"--seq-length 24 --micro-batch-size 3 --hidden-dropout 0".split(),
    ]
    tiled, plain = (
        kept([*job, *more], size, slice(1, 4)) for more in (["--tiled-mlp", "3"], [])
    )
    assert tiled[0] == tiled[2]  # measured, planned
    wide = 24 * 3 * 4 * 256 // size  # [s, b, f/t]
    if style == "llama":
        wide = 24 * 3 * 4 * parse([*JOB, *job], world_size=size).model.ffn_size // size
    assert plain[0] - tiled[0] == 3 * wide * (3 if style == "llama" else 2)


def test_a_plan_for_gpus_has_the_working_memory_of_one_tile():
    job = [
        *JOB,
        *(
            "--seq-length 4096 --micro-batch-size 1 --bf16 --hidden-dropout 0 --attention-dropout 0 "
            "--recompute-granularity full --ffn-hidden-size 2048 --tiled-logits"
        ).split(),
    ]
    plain, tiled = (
        plan_world(parse([*job, *more], world_size=1), 0, "cuda").rank_plan(0)
        for more in ([], ["--tiled-mlp"])
    )
    wide = 4096 * 2048 * 2
    assert tiled.kept == plain.kept and plain.at_work > 2 * wide
    assert tiled.at_work < plain.at_work - wide


def test_tiles_count_as_flops_that_backward_computes_again():
    job = [*JOB, "--seq-length", "256", "--micro-batch-size", "1"]
    again = {}
    for name, flags in {
        "none": [],
        "tiled": ["--tiled-mlp"],
        "whole": ["--tiled-mlp", "1"],
        "full": ["--recompute-granularity", "full"],
        "both": ["--recompute-granularity", "full", "--tiled-mlp"],
        "one": "--recompute-granularity full --recompute-num-layers 1 --tiled-mlp".split(),
    }.items():
        config = parse([*job, *flags], world_size=1)
        again[name] = recomputed_flops(
            config, describe_layers(config, fake_mesh(Grid(), 0))
        )
    mlp = 2 * 256 * 2 * 64 * 256  # s tokens, two products of h × f
    assert again["none"] == again["whole"] == 0 and again["tiled"] == 3 * mlp
    assert (
        again["both"] == again["full"] and again["one"] == again["full"] / 3 + 2 * mlp
    )
