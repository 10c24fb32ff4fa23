"""Index maps built off-line are those that the run looks for."""

import os

import numpy as np
import pytest

from megatron_ds.commands import prepare_cache
from megatron_ds.config import parse
from megatron_ds.data.loading import corpora as corpora_of_run
from megatron_ds.data.loading import datasets
from megatron_ds.data.samples import gpt_corpus
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.training.samples import wanted_samples

pytestmark = pytest.mark.plan

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 30 --eval-iters 1 --eval-interval 10 "
    "--tokenizer-type NullTokenizer "
    "--vocab-size 100"
).split()


@pytest.fixture
def corpora(tmp_path):
    for name, documents in (("a", 60), ("b", 25)):
        with IndexedWriter(tmp_path / name, np.uint16) as w:
            for i in range(documents):
                w.add_document(np.full(9 + i % 3, i))
    return [
        "--data-path",
        "0.6",
        str(tmp_path / "a"),
        "0.4",
        str(tmp_path / "b"),
        "--split",
        "8,1,1",
    ]


def test_a_run_finds_what_was_prepared_and_builds_nothing(
    corpora, tmp_path, monkeypatch, capsys
):
    flags = [*FLAGS, *corpora, "--data-cache-path", str(tmp_path / "kept")]
    assert prepare_cache.main(["--prepare-cache-world-size", "4", *flags]) == 0
    printed = capsys.readouterr().out
    assert (
        "train data" in printed
        and "60.00%" in printed
        and str(tmp_path / "kept") in printed
    )
    # parts of two corpora and a blend; the lock
    assert len(os.listdir(tmp_path / "kept")) == 3 * (2 * 4 + 3) + 1
    for module, name in (
        (gpt_corpus, "build_index_maps"),
        (corpora_of_run, "build_blend_index"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("built again"))
    config = parse(flags)
    found = datasets.build_datasets(
        config, wanted_samples(config), build_tokenizer(config.data, config.model)
    )
    assert len(found.train) == 120 and found.train[7]["tokens"].shape == (9,)


def test_what_cannot_be_prepared_is_an_error(corpora, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match="file/cache cannot be written: Not a directory"
    ):
        prepare_cache.main(
            [*FLAGS, *corpora, "--data-cache-path", str(tmp_path / "file" / "cache")]
        )
    with pytest.raises(ConfigError, match="no index maps"):
        prepare_cache.main([*FLAGS, "--mock-data"])
    with pytest.raises(ConfigError, match="world-size none is not a number"):
        prepare_cache.main(["--prepare-cache-world-size", "none", *FLAGS])
