"""Splits, blends, and the datasets that a run's flags ask for."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config.options.data import DataConfig
from megatron_ds.data.loading.blend import (
    Blend,
    CorpusSlice,
    Draw,
    build_blend_index,
    build_exhaustive_index,
    count_draws,
    cut,
    draws_text,
    parse_blend,
    samples_to_provide,
)
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.loading.sources import parse_split
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError, DataError

pytestmark = pytest.mark.plan


def test_splits_are_cut_as_megatron_cuts_them():
    assert parse_split("969, 30, 1") == pytest.approx((0.969, 0.03, 0.001))
    assert parse_split("98/2") == (0.98, 0.02, 0.0) and parse_split("1") == (1, 0, 0)
    assert cut(1000, parse_split("969,30,1")) == (
        range(0, 969),
        range(969, 999),
        range(999, 1000),
    )
    assert cut(10, parse_split("1,1,1")) == (range(0, 3), range(3, 7), range(7, 10))
    assert cut(5, parse_split("1,1,0")) == (
        range(0, 2),
        range(2, 5),
        range(5, 5),
    )  # 2.5 rounds to the even 2


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf"])
def test_a_split_that_is_none_is_an_error_showing_one(text):
    with pytest.raises(ConfigError, match="969,30,1"):
        parse_split(text)


def test_blends_have_the_golden_values():
    which, sample = build_blend_index([0.3, 0.5, 0.2], 20)
    assert which.tolist() == [
        1,
        0,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
    ]
    assert sample.tolist() == [which[:i].tolist().count(w) for i, w in enumerate(which)]
    assert which.dtype == np.int16 and sample.dtype == np.int64
    assert build_blend_index([0.5, 0.5], 7)[0].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert build_blend_index([0.001, 0.999], 10)[0].tolist() == [
        1,
        0,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
    ]
    assert build_exhaustive_index([3, 5, 2])[0].tolist() == [
        1,
        0,
        2,
        1,
        0,
        1,
        2,
        1,
        0,
        1,
    ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
def test_an_exhaustive_blend_draws_each_sample_once(sizes):
    which, sample = build_exhaustive_index(sizes)
    assert sorted(zip(which.tolist(), sample.tolist())) == [
        (d, i) for d, n in enumerate(sizes) for i in range(n)
    ]


def test_weights_are_told_from_prefixes():
    assert parse_blend(["a"], "--data-path") == parse_blend(["a"], "--data-path")
    assert parse_blend(["a", "b"], "--data-path").weights is None
    assert parse_blend(["3", "a", "1", "b"], "--data-path").shares == [0.75, 0.25]
    for words in (
        ["3", "a", "b"],
        ["3", "a", "b", "4"],
        ["0", "a"],
        ["-1", "a"],
        ["nan", "a"],
    ):
        with pytest.raises(ConfigError, match="--valid-data-path"):
            parse_blend(words, "--valid-data-path")


def write(prefix, sizes, first):
    with IndexedWriter(prefix, np.int32) as w:
        for size in sizes:
            w.add_document(np.arange(first, first + size))
            first += size
    return str(prefix)


@pytest.fixture
def corpora(tmp_path):
    """Three corpora of 100, 40 and 10 documents; a token tells its corpus by its thousands."""
    return [
        write(tmp_path / name, [9] * n, first)
        for name, n, first in [("a", 100, 1000), ("b", 40, 3000), ("c", 10, 5000)]
    ]


def configured(**data):
    data = DataConfig(**{"split": "8,1,1", "dataloader_type": "single", **data})
    return SimpleNamespace(
        data=data, model=SimpleNamespace(seq_length=4), train=SimpleNamespace(seed=1234)
    )


TOKENIZER = make_tokenizer("NullTokenizer", vocab_size=6000)


def tokens_of(dataset, count=None):
    return {int(t) for i in range(count or len(dataset)) for t in dataset[i]["tokens"]}


def test_parts_of_a_corpus_share_no_token(corpora):
    parts = build_datasets(configured(data_path=corpora[:1]), (200, 50, 20), TOKENIZER)
    assert [len(p) >= n for p, n in zip(parts, (200, 50, 20))] == [True] * 3
    train, valid, test = map(tokens_of, parts)
    assert (
        train <= {*range(1000, 1720)}
        and valid <= {*range(1720, 1810)}
        and test <= {*range(1810, 1900)}
    )


def test_a_blend_draws_from_each_corpus_by_its_weight_and_repeats_the_small_ones(
    corpora,
):
    words = ["0.5", corpora[0], "0.3", corpora[1], "0.2", corpora[2]]
    train, valid, _ = build_datasets(
        configured(data_path=words, split="6,4"), (300, 10, 0), TOKENIZER
    )
    assert len(train) == 300
    drawn = [int(train[i]["tokens"][0]) // 2000 for i in range(300)]
    assert [drawn.count(k) for k in range(3)] == [150, 90, 60]
    assert drawn[:10] == build_blend_index([0.5, 0.3, 0.2], 10)[0].tolist()
    again = build_datasets(
        configured(data_path=words, split="6,4"), (300, 10, 0), TOKENIZER
    ).train
    assert all((train[i]["tokens"] == again[i]["tokens"]).all() for i in range(300))
    assert samples_to_provide(300, 0.2) == 61 and len(valid) == 10


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=40), st.integers(1, 300))
def test_a_blend_never_draws_more_than_was_provided(weights, size):
    shares = (np.array(weights) / sum(weights)).tolist()
    counts = np.bincount(build_blend_index(shares, size)[0], minlength=len(shares))
    assert all(n <= samples_to_provide(size, share) for n, share in zip(counts, shares))


def test_corpora_without_weights_are_read_once_each(corpora):
    cfg = configured(data_path=corpora, split="1")
    total = sum((n * 9 - 1) // 4 for n in (100, 40, 10))
    train = build_datasets(cfg, (total, 0, 0), TOKENIZER).train
    assert (
        len(train) == total == len({train[i]["tokens"].tobytes() for i in range(total)})
    )
    assert len(build_datasets(cfg, (50, 0, 0), TOKENIZER).train) == 50
    with pytest.raises(DataError, match="put a weight before each"):
        build_datasets(cfg, (total + 1, 0, 0), TOKENIZER)
    cfg = configured(data_path=corpora, split="1", dataloader_type="cyclic")
    assert len(build_datasets(cfg, (total + 1, 0, 0), TOKENIZER).train) == total


def test_each_part_can_have_a_path_of_its_own(corpora):
    cfg = configured(
        train_data_path=corpora[:1], valid_data_path=["1", corpora[1], "1", corpora[2]]
    )
    parts = build_datasets(cfg, (225, 20, 5), TOKENIZER)
    assert tokens_of(parts.train) > {*range(1000, 1890)} and tokens_of(parts.valid) & {
        *range(5000, 5090)
    }
    assert parts.test is None


def test_an_empty_part_is_an_error_with_numbers_and_remedy(corpora):
    told = "c: the test part is empty: --split 969,30,1 .* 10 documents .* train 10, valid 0, test 0"
    with pytest.raises(DataError, match=told):
        build_datasets(
            configured(data_path=corpora[2:], split="969,30,1"), (5, 0, 5), TOKENIZER
        )
    assert (
        build_datasets(
            configured(data_path=corpora[2:], split="969,30,1"), (5, 0, 0), TOKENIZER
        ).valid
        is None
    )
    assert (
        build_datasets(
            configured(data_path=corpora[2:], split="8,2,0"), (5, 2, 5), TOKENIZER
        ).test
        is None
    )
    with pytest.raises(DataError, match="no training data"):
        build_datasets(
            configured(data_path=corpora[2:], split="0,1,1"), (5, 0, 5), TOKENIZER
        )
    with pytest.raises(DataError, match="nowhere.idx does not exist"):
        build_datasets(configured(data_path=["nowhere"]), (5, 0, 0), TOKENIZER)


def test_mock_data_is_a_function_of_seed_and_number_alone():
    one, two = (
        build_datasets(
            configured(mock_data=True),
            (9, 4, 0),
            make_tokenizer("NullTokenizer", vocab_size=50),
        )
        for _ in range(2)
    )
    assert len(one.train) == 9 and len(one.valid) == 4 and one.test is None
    for i in range(9):
        tokens = one.train[i]["tokens"]
        assert (
            tokens.shape == (5,)
            and 0 <= tokens.min()
            and tokens.max() <= 50
            and 50 in tokens
        )
        assert (tokens == two.train[i]["tokens"]).all()
    assert (one.train[0]["tokens"] != one.valid[0]["tokens"]).any()


def test_words_of_a_blend_may_stand_in_a_file(corpora, tmp_path):
    words = ["0.5", corpora[0], "0.5", corpora[1]]
    (tmp_path / "words").write_text(f"0.5 {corpora[0]}\n0.5 {corpora[1]}\n")
    (tmp_path / "parts.json").write_text(
        json.dumps({"train": words, "valid": [1, corpora[2]]})
    )
    direct, from_file = (
        build_datasets(configured(**named), (90, 5, 0), TOKENIZER)
        for named in ({"data_path": words}, {"data_args_path": str(tmp_path / "words")})
    )
    assert (direct.train.dataset_index == from_file.train.dataset_index).all()
    assert all(
        (direct.train[i]["tokens"] == from_file.train[i]["tokens"]).all()
        for i in range(90)
    )
    parts = build_datasets(
        configured(per_split_data_args_path=str(tmp_path / "parts.json")),
        (90, 5, 0),
        TOKENIZER,
    )
    assert (
        tokens_of(parts.valid) <= {*range(5000, 5090)}
        and tokens_of(parts.train) & {*range(3000, 3360)}
        and not parts.test
    )


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "it is not valid JSON"),
        ("[1]", "no training data"),
        ('{"train": []}', "no training data"),
        ('{"train": "a"}', "not a list"),
        ('{"train": ["a"], "validation": ["b"]}', "a part 'validation'"),
        ('{"train": [["a"]]}', "not a list"),
    ],
)
def test_a_file_of_parts_that_is_none_is_an_error_with_an_example(tmp_path, text, told):
    (tmp_path / "parts.json").write_text(text)
    with pytest.raises(
        DataError, match=f'parts.json: .*{told}.* It must hold ."train"'
    ):
        build_datasets(
            configured(per_split_data_args_path=str(tmp_path / "parts.json")),
            (9, 0, 0),
            TOKENIZER,
        )
    with pytest.raises(DataError, match="nowhere cannot be read: No such file"):
        build_datasets(
            configured(data_args_path=str(tmp_path / "nowhere")), (9, 0, 0), TOKENIZER
        )


def test_weights_of_zero_leave_a_corpus_out_and_nothing_but_zeros_is_an_error():
    blend = parse_blend(["3", "a", "0", "b", "1", "c"], "--data-path")
    assert (
        blend.prefixes == ("a", "c")
        and blend.shares == [0.75, 0.25]
        and blend.left_out == ("b",)
    )
    assert parse_blend(["0", "a", "1", "a"], "--data-path") == Blend(
        (CorpusSlice("a"),), (1.0,), ("a",)
    )
    with pytest.raises(ConfigError, match="all weights are 0"):
        parse_blend(["0", "a", "0", "b"], "--data-path")


def test_numbers_may_say_how_often_a_corpus_is_read(corpora, caplog):
    caplog.set_level("INFO")
    words = [
        "1",
        corpora[0],
        "3",
        corpora[1],
        "2",
        corpora[2],
    ]  # 900, 360 and 90 tokens
    wanted = (900 + 3 * 360 + 2 * 90) // 4
    train = build_datasets(
        configured(data_path=words, split="1", blend_weights="epochs"),
        (wanted, 0, 0),
        TOKENIZER,
    ).train
    drawn = np.bincount(train.dataset_index) * 4 / [900, 360, 90]
    assert drawn == pytest.approx([1, 3, 2], abs=0.05)
    told = {
        row.split()[0]: row.split()[-1]
        for row in caplog.text.splitlines()
        if row.startswith("  ")
    }
    assert told == {"a": "1.00", "b": "3.00", "c": "2.00"}


def test_evaluation_leaves_out_corpora_without_text_in_its_part_and_says_so(
    corpora, caplog
):
    caplog.set_level("INFO")
    # 969,30,1 gives valid 3, 1 and 0 documents
    words = ["0.5", corpora[0], "0.3", corpora[1], "0.2", corpora[2]]
    cfg = configured(data_path=words, split="969,30,1")
    valid = build_datasets(cfg, (300, 16, 0), TOKENIZER).valid
    assert np.bincount(valid.dataset_index).tolist() == [10, 6]
    assert (
        "the valid part has no text of" in caplog.text
        and "other 2 of 3 corpora" in caplog.text
    )
    with pytest.raises(DataError, match="test part is empty"):
        build_datasets(
            configured(data_path=words, split="1,0,0.0001"), (300, 0, 5), TOKENIZER
        )


def test_the_report_tells_samples_shares_and_epochs_of_each_corpus():
    draws = [Draw("web", 0.7, 700, 9000), Draw("books", 0.3, 300, 300)]
    rows = draws_text("train", draws, 4).splitlines()
    assert rows[1].split() == ["web", "70.00%", "700", "70.00%", "0.31"]
    assert rows[2].split() == ["books", "30.00%", "300", "30.00%", "4.00"]
    many = draws_text(
        "train", [Draw(f"c{i}", None, i, 40) for i in range(100)], 4
    ).splitlines()
    assert (
        len(many) == 26 and many[1].split()[0] == "c99" and "of 100 corpora" in many[-1]
    )
    assert count_draws(np.array([2, 0, 2], np.int16), 4).tolist() == [1, 0, 2, 0]


def test_shares_are_normalised_as_often_as_megatron_does_it():
    # these sum to 0.9999999999999999
    blend = parse_blend(["0.6", "a", "0.3", "b", "0.1", "c"], "--data-path")
    assert blend.shares == [
        0.6000000000000001,
        0.30000000000000004,
        0.10000000000000002,
    ]
    assert blend.order_shares == [0.6, 0.3, 0.09999999999999999]


def test_a_weight_before_one_corpus_makes_a_blend_of_one(corpora):
    alone, blend = (
        build_datasets(
            configured(data_path=words, split="1"), (400, 0, 0), TOKENIZER
        ).train
        for words in (corpora[:1], ["1", corpora[0]])
    )
    assert len(alone) == 449 and len(blend) == 400 and len(blend.datasets[0]) == 449
    assert samples_to_provide(400, 1.0) == 402
