"""Ranges of documents in data paths, and BigScience's weighted split paths, which are read as such."""

import pytest

from megatron_ds.config.parse import parse
from megatron_ds.data.loading.blend import CorpusSlice, parse_blend
from megatron_ds.data.loading.datasets import (
    build_datasets,
    fit_default_split,
    identify,
)
from megatron_ds.data.loading.sources import read_sources
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from tests.data.test_blend import tokens_of, write

pytestmark = pytest.mark.plan

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 4 --micro-batch-size 1 "
    "--train-iters 100 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 6000"
).split()
TOKENIZER = make_tokenizer("NullTokenizer", vocab_size=6000)
LENGTH = 9


@pytest.fixture
def corpora(tmp_path):
    """Three corpora of 100, 40 and 10 documents of 9 tokens; a token shows its corpus by its thousands."""
    return [
        write(tmp_path / name, [LENGTH] * n, first)
        for name, n, first in [("a", 100, 1000), ("b", 40, 3000), ("c", 10, 5000)]
    ]


def configured(*words):
    return parse([*RUN, *words], 1, env={})


def of_documents(first_token, start, stop):
    return {*range(first_token + LENGTH * start, first_token + LENGTH * stop)}


def drawn(dataset, count):
    """How many of the first samples have their first token in each thousand."""
    thousands = [int(dataset[i]["tokens"][0]) // 1000 * 1000 for i in range(count)]
    return {thousand: thousands.count(thousand) for thousand in sorted(set(thousands))}


def test_weighted_split_paths_draw_from_their_ranges_by_their_weights(corpora):
    a, b, c = corpora
    config = configured(
        "--train-weighted-split-paths",
        f"TRAIN: 0.3 0:0.6 {a}, 0.7 0:1 {b}",
        "--valid-weighted-split-paths",
        f"VALID: 2 0.6:0.8 {a}, 1 0:0.25 {c}",
        "--test-weighted-split-paths",
        f"TEST: 1 0.8:1 {a}",
    )
    parts = build_datasets(config, (1000, 300, 100), TOKENIZER)
    train = tokens_of(parts.train)
    assert train == of_documents(1000, 0, 60) | of_documents(3000, 0, 40)
    assert drawn(parts.train, 1000) == {1000: 300, 3000: 700}
    assert tokens_of(parts.valid) == of_documents(1000, 60, 80) | of_documents(
        5000, 0, 2
    )  # 2.5 → the even 2
    assert drawn(parts.valid, 300) == {1000: 200, 5000: 100}
    assert tokens_of(parts.test) == of_documents(1000, 80, 100)


def test_a_group_of_one_corpus_is_that_corpus_without_a_blend(corpora):
    config = configured("--train-weighted-split-paths", f"T: 0.5 0.1:0.2 {corpora[0]}")
    plain = configured("--train-data-path", "0.1:0.2", corpora[0])
    ours, theirs = (
        build_datasets(one, (30, 0, 0), TOKENIZER).train for one in (config, plain)
    )
    assert [list(ours[i]["tokens"]) for i in range(30)] == [
        list(theirs[i]["tokens"]) for i in range(30)
    ]
    assert tokens_of(ours) == of_documents(1000, 10, 20)


def test_a_group_may_stand_in_a_file_that_is_read_with_the_data(corpora, tmp_path):
    file = tmp_path / "train.txt"
    config = configured("--train-weighted-split-paths-path", str(file))
    with pytest.raises(DataError, match="train.txt cannot be read"):
        read_sources(config.data)
    file.write_text(f'"TRAIN: 1 0:0.5 {corpora[0]}, 3 0:1 {corpora[1]}"\n')
    assert drawn(build_datasets(config, (400, 0, 0), TOKENIZER).train, 400) == {
        1000: 100,
        3000: 300,
    }
    file.write_text('"A: 1 0:1 a" "B: 1 0:1 b"\n')
    with pytest.raises(ConfigError, match=r"@.*train.txt has 2 groups \(A, B\)"):
        read_sources(config.data)
    file.write_text('"A: 1 0:1 a')
    with pytest.raises(ConfigError, match="No closing quotation"):
        read_sources(config.data)
    file.write_text(f"2 0:0.5\n{corpora[0]} 1 {corpora[1]}")
    named = read_sources(configured("--data-path", f"@{file}").data).whole
    assert named.values == ("2", "0:0.5", corpora[0], "1", corpora[1])
    file.write_text("\n")
    with pytest.raises(DataError, match="it is empty"):
        read_sources(config.data)


@pytest.mark.parametrize(
    "groups, told",
    [
        (["V1: 1 0:1 a", "V2: 1 0:1 b"], r"has 2 groups \(V1, V2\).*--skip-train"),
        (["1 0:1 a, 1 0:1 b"], "does not have the form"),
        (["T: 1 0:1 a 1 0:1 b"], "comma after each prefix"),
        (["T: 1 a"], "does not have the form"),
        ([], "does not have the form"),
    ],
)
def test_other_forms_of_groups_are_refused_with_the_form(groups, told):
    with pytest.raises(ConfigError, match=told) as refused:
        configured("--train-weighted-split-paths", *groups)
    assert "missing: the data" not in str(refused.value)


@pytest.mark.parametrize(
    "words, told",
    [
        ("0.6:0.3 a", "0.6:0.3 is not a range"),
        ("1 0:1.5 a", "0:1.5 is not"),
        ("1 0.5:0.5 a", "0.5:0.5 is not"),
        ("1 0:1", "no prefix after it"),
        ("1 0..1:1 a", "is not a range"),
        ("1 0:1 a b", "a weight before each"),
    ],
)
def test_what_is_no_range_of_documents_is_an_error(words, told):
    with pytest.raises(ConfigError, match=told):
        parse_blend(words.split(), "--data-path")


def test_ranges_stand_before_prefixes_with_and_without_weights():
    assert parse_blend("0:0.5 a ./0:1 b".split(), "--data-path").slices == (
        CorpusSlice("a", 0, 0.5),
        CorpusSlice("./0:1"),
        CorpusSlice("b"),
    )
    blend = parse_blend("1 0:1e-3 a 0 0:1 b 3 c".split(), "--data-path")
    assert blend.slices == (
        CorpusSlice("a", 0, 1e-3),
        CorpusSlice("c"),
    ) and blend.shares == [
        0.25,
        0.75,
    ]
    assert blend.left_out == ("b",)


def test_a_split_divides_the_documents_of_a_range(corpora):
    config = configured("--data-path", "0.5:0.9", corpora[0], "--split", "3,1,0")
    parts = build_datasets(config, (200, 60, 0), TOKENIZER)
    assert tokens_of(parts.train) == of_documents(1000, 50, 80)
    assert tokens_of(parts.valid) == of_documents(1000, 80, 90)
    small = configured("--data-path", "0:0.1", corpora[0])
    assert fit_default_split(small, (50, 1, 0)).data.split == "9,1,0"


def test_a_range_without_a_document_is_an_error_with_numbers(corpora):
    config = configured("--train-data-path", "0:0.01", corpora[2])
    with pytest.raises(DataError, match="c: the range 0:0.01 is 0 of its 10 documents"):
        build_datasets(config, (5, 0, 0), TOKENIZER)


def test_the_identity_of_the_data_has_the_range(corpora):
    whole, full, part = (
        identify([corpora[0]]),
        identify(["0:1", corpora[0]]),
        identify(["0:0.5", corpora[0]]),
    )
    assert whole == full and part == [f"{whole[0]} 0:0.5"]
