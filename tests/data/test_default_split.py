"""The default split and a small corpus: what is validated, what is left out, and what a checkpoint
records."""

import numpy as np
import pytest

from megatron_ds.config import parse
from megatron_ds.data.loading.blend import cut
from megatron_ds.data.loading.datasets import build_datasets, fit_default_split
from megatron_ds.data.loading.sources import parse_split
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import TOKENIZERS, build_tokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.bert.data import BERT_DATA
from megatron_ds.training.run_checkpoint import describe_run
from megatron_ds.training.samples import wanted_samples

pytestmark = pytest.mark.plan

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 30 --eval-iters 1 --eval-interval 10 "
    "--tokenizer-type NullTokenizer "
    "--vocab-size 5000"
).split()


def corpus_of(path, documents):
    """Document i is 9 times the number i."""
    with IndexedWriter(path, np.uint16) as w:
        for i in range(documents):
            w.add_document(np.full(9, i))
    return str(path)


def build(*flags):
    """(config, datasets) as a run makes them."""
    config = parse([*FLAGS, *flags], known={"data.tokenizer_type": TOKENIZERS})
    config = fit_default_split(config, wanted_samples(config))
    return config, build_datasets(
        config, wanted_samples(config), build_tokenizer(config.data, config.model)
    )


def documents_in(dataset):
    return (
        {int(token) for i in range(len(dataset)) for token in dataset[i]["tokens"]}
        if dataset
        else None
    )


@pytest.mark.parametrize(
    "documents, train, valid, test",
    [
        (1, {0}, None, None),
        (2, {0}, {1}, None),
        (10, {*range(9)}, {9}, None),
        (16, {*range(15)}, {15}, None),
        (17, {*range(16)}, {16}, None),
        (79, {*range(77)}, {77, 78}, None),
        (600, {*range(581)}, {*range(581, 599)}, {599}),
    ],
)
def test_a_small_corpus_without_a_split_is_validated_where_it_can_be(
    tmp_path, caplog, documents, train, valid, test
):
    caplog.set_level("INFO", "megatron_ds.data.loading.corpora")
    config, found = build(
        "--data-path",
        corpus_of(tmp_path / "c", documents),
        "--seq-length",
        "16",
        "--train-iters",
        "400",
    )
    assert [documents_in(part) for part in (found.train, found.valid, found.test)] == [
        train,
        valid,
        test,
    ]
    assert (config.data.split is None) == (documents in (1, 17, 79, 600))
    told = [
        record.message
        for record in caplog.records
        if " set: " in record.message or "default --split" in record.message
    ]
    assert len(told) == {1: 2, 600: 0}.get(documents, 1 + (documents < 17)), told


def test_a_split_of_ones_own_is_never_changed(tmp_path):
    path = corpus_of(tmp_path / "c", 10)
    for split in ("969,30,1", "969, 30, 1", "80,1,19"):
        with pytest.raises(
            DataError,
            match="the valid part is empty: --split .* divides the 10 documents",
        ):
            build("--data-path", path, "--split", split)


def test_blends_adapt_only_where_no_corpus_has_validation_text(tmp_path):
    small, smaller, large = (
        corpus_of(tmp_path / name, n) for name, n in (("a", 10), ("b", 3), ("c", 100))
    )
    config, found = build("--data-path", "1", small, "1", large)
    assert config.data.split is None and documents_in(found.valid) <= {*range(97, 100)}
    config, found = build("--data-path", "1", small, "1", smaller)
    assert config.data.split == "9,1,0" and documents_in(found.valid) == {9}


def test_a_checkpoint_records_the_split_in_use(tmp_path):
    path = corpus_of(tmp_path / "c", 10)
    (config, _), (same, _), (other, _) = (
        build("--data-path", path, *more)
        for more in ([], ["--split", "90,10,0"], ["--eval-iters", "0"])
    )
    tokenizer = build_tokenizer(config.data, config.model)
    identity = [
        describe_run(c, c, tokenizer, "run")["identity"]["data"]["split"]
        for c in (config, same, other)
    ]
    assert identity[0] == identity[1] == list(parse_split("9,1,0")) and identity[
        2
    ] == list(parse_split("969,30,1"))


@pytest.mark.parametrize("count", range(2, 400))
def test_the_last_document_is_what_is_kept_for_validation(count):
    assert cut(count, parse_split(f"{count - 1},1,0")) == (
        range(count - 1),
        range(count - 1, count),
        range(count, count),
    )


def test_documents_of_sentences_are_counted_as_documents(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as w:
        for _ in range(4):
            w.add_document(np.arange(9), [3, 3, 3])
    config = parse(
        [*FLAGS, "--data-path", str(tmp_path / "c")],
        known={"data.tokenizer_type": TOKENIZERS},
    )
    assert fit_default_split(config, (9, 9, 9), BERT_DATA).data.split == "3,1,0"
