"""What metrics.jsonl has of the model and the data of a run, for readers."""

import pytest

from megatron_ds.config import Source, parse
from megatron_ds.extensions.report.run_summary import corpora_of, summary_of
from megatron_ds.mpu.grid import Grid

pytestmark = pytest.mark.plan

JOB = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 2 --bf16 --zero-stage 1 --global-batch-size 8 --tensor-model-parallel-size 2"
).split()


def configured(*words):
    config = parse([*JOB, *words], world_size=4)
    return config.with_values({"model.vocab_size": 51}, Source("derived", "a test"))


def test_the_summary_has_the_whole_model_and_the_axes_that_divide_something():
    config = configured("--mock-data", "--vocab-size", "51")
    h, s, v = 24, 16, 51
    expected = 3 * (12 * h * h + 13 * h) + v * h + s * h + 2 * h
    assert summary_of(config, Grid.fit(world_size=4, tp=2)) == {
        "model": "gpt",
        "parameters": expected,
        "trained": expected,
        "layers": 3,
        "width": 24,
        "heads": 4,
        "experts": 0,
        "vocabulary": 51,
        "sequence": 16,
        "data": ["mock tokens"],
        "batch": 8,
        "optimizer": "adam",
        "dtype": "bfloat16",
        "layout": {"tp": 2, "dp": 2},
        "zero": 1,
    }


@pytest.mark.parametrize(
    "words, names",
    [
        ("--data-path /data/wiki_text_document", ["wiki_text_document"]),
        ("--data-path 0.3 a/wiki 7e-1 0:0.6 b/code", ["wiki", "code"]),
        ("--train-data-path 1 a/x 2 y --valid-data-path z", ["x", "y"]),
    ],
)
def test_corpora_have_their_names_without_weights_ranges_and_folders(words, names):
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 50".split()
    assert corpora_of(configured(*words.split(), *tokenizer).data) == names


def test_corpora_that_a_file_lists_are_those_of_the_file(tmp_path):
    (tmp_path / "words").write_text("0.5 a/one\n0.5 two\n")
    words = f"--data-args-path {tmp_path / 'words'} --tokenizer-type NullTokenizer --vocab-size 50"
    assert corpora_of(configured(*words.split()).data) == ["one", "two"]
