"""What a run prints before its first step."""

import pytest

from megatron_ds.config import RunConfig, Source, parse
from megatron_ds.config.messages import value_text
from megatron_ds.config.run import non_default
from megatron_ds.extensions.startup.startup_text import (
    WIDTH,
    count_parameters,
    grid_text,
    layers_text,
    values_text,
    vocabulary_text,
)
from megatron_ds.models import MODELS, Layer
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.mpu.grid import Grid

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 50 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --lr 1e-3 --train-iters 2 "
    "--mock-data"
).split()


def test_axes_that_do_not_exist_yet_are_not_shown():
    assert grid_text(Grid.fit(world_size=4, tp=2, pp=2), "torchrun", "cpu") == (
        "grid: 4 ranks = tp 2 × pp 2 × dp 1, order tp-dp-pp, launched by torchrun, device cpu"
    )
    assert "cp 2" in grid_text(Grid.fit(world_size=4, tp=2, cp=2), "none", "cpu")


@pytest.mark.parametrize(
    "model, layers, words",
    [
        ("gpt", slice(0, 5), "3 blocks, embedding, final norm"),
        ("gpt", slice(2, 6), "2 blocks, final norm, output head"),
        ("bert", slice(0, 2), "1 block, embedding"),
        ("bert", slice(3, 6), "1 block, final norm, output heads"),
        ("gpt", slice(0, 0), "no layers"),
    ],
)
def test_a_stage_is_described_by_the_nouns_of_its_layers(model, layers, words):
    config = parse([*JOB, "--model", model])
    assert layers_text(MODELS[model](config.model, ParallelContext())[layers]) == words


def test_layers_without_a_noun_are_described_by_their_kind():
    assert (
        layers_text([Layer("first", Layer, "router"), Layer("second", Layer, "router")])
        == "2 × router"
    )


@pytest.mark.parametrize(
    "given, found, padded, adds_end, words",
    [
        (
            512,
            513,
            640,
            True,
            "513 tokens (--vocab-size 512 and one for the end of a document), padded to 640 rows "
            "(--make-vocab-size-divisible-by)",
        ),
        (
            None,
            50257,
            50304,
            False,
            "50,257 tokens, padded to 50,304 rows (--make-vocab-size-divisible-by)",
        ),
        (
            512,
            2048,
            2048,
            False,
            "2,048 tokens (of the tokenizer; --vocab-size 512 is not used)",
        ),
        (2048, 2048, 2048, False, "2,048 tokens"),
    ],
)
def test_the_size_of_the_vocabulary_is_explained(given, found, padded, adds_end, words):
    assert vocabulary_text(given, found, padded, adds_end) == "vocabulary: " + words


@pytest.mark.parametrize(
    "tp, pp, tied", [(1, 1, True), (2, 1, True), (2, 2, True), (1, 2, False)]
)
def test_the_model_is_counted_whole_whatever_a_rank_holds(tp, pp, tied):
    layout = (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}".split()
    )
    words = [
        *JOB,
        *layout,
        *([] if tied else ["--untie-embeddings-and-output-weights"]),
    ]
    config = parse([*words], world_size=tp * pp)
    config = config.with_values(
        {"model.vocab_size": 51}, Source("derived", "the tokenizer")
    )
    h, s, v = 24, 16, 51
    block = 12 * h * h + 13 * h  # qkv, proj, fc1, fc2 with biases, and two LayerNorms
    expected = 3 * block + v * h + s * h + 2 * h + (0 if tied else v * h)
    grid = Grid.fit(world_size=tp * pp, tp=tp, pp=pp)
    assert count_parameters(config, grid) == (expected, expected)
    adapted = ["--lora-rank", "3", "--lora-target-modules", "linear_qkv"]
    config = parse([*words, *adapted], world_size=tp * pp)
    config = config.with_values(
        {"model.vocab_size": 51}, Source("derived", "the tokenizer")
    )
    of_adapters = 3 * 3 * (h + 3 * h)
    assert count_parameters(config, grid) == (expected + of_adapters, of_adapters)


def test_values_are_listed_by_source_in_a_few_lines(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "num_layers: 3\nhidden_size: 24\nnum_attention_heads: 4\nseq_length: 16\nlr: 1e-3\n"
    )
    config = parse(
        [
            "--config",
            str(path),
            *JOB[JOB.index("--vocab-size") : JOB.index("--lr")],
            *"--train-iters 2 --mock-data --zero-stage 1 --seed 5 --log-interval 7 --eval-iters 0".split(),
        ]
    )
    text = values_text(config)
    title, *lines = text.split("\n")
    assert title == "not at their defaults:"
    assert (
        " ".join(lines[0].split()[1:])
        == "num_layers 3, hidden_size 24, num_attention_heads 4, seq_length 16, lr 0.001"
    )
    assert lines[0].startswith("  job.yaml  ") and "zero_stage 1" in text
    assert [line.split()[0] for line in lines if line[2] != " "] == [
        "job.yaml",
        "flags",
        "derived",
    ]
    assert "tokenizer_type NullTokenizer (for --mock-data)" in text
    for option, value in non_default(config):
        assert value_text(value) in text, option.path
    count = len(list(non_default(config)))
    assert len(lines) < count / 2 and max(map(len, lines)) <= WIDTH


def test_with_nothing_to_list_there_is_one_line():
    assert values_text(RunConfig()) == "every option is at its default"
