"""A run that is continued for longer than it was planned keeps the order of its samples, and says what changes."""

import re

import numpy as np
import pytest

from megatron_ds.config.parse import read
from megatron_ds.data.loading.continued import ContinuedDataset, pieces_of
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import make_tokenizer
from tests.harness.pretraining import TINY, VOCAB, losses, records, run_file, train

pytestmark = pytest.mark.processes
CONSTANT = "--lr-decay-style constant --lr-warmup-iters 0".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """80 samples of 16 tokens: 20 steps of 4 are an epoch."""
    draw = np.random.default_rng(5)
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(64):
            writer.add_document(draw.integers(0, VOCAB - 1, 20))
    return prefix


def words(corpus, *more):
    data = ["--data-path", str(corpus), "--split", "100,0,0"]
    return [*TINY, *CONSTANT, *data, *map(str, more)]


def test_the_samples_that_were_planned_keep_their_order(corpus, tmp_path):
    # 22 steps are 1.1 epochs, 36 are 1.8, of which the whole corpus is shuffled otherwise.
    train(1, words(corpus, "--train-iters", 22, "--save", tmp_path / "whole"))
    save = ["--save", tmp_path / "run", "--save-interval", 8]
    train(1, words(corpus, "--train-iters", 22, "--exit-interval", 16, *save))
    again = [*save, "--load", tmp_path / "run", "--train-iters", 36]
    [ended] = train(1, words(corpus, *again))
    whole = losses(tmp_path / "whole")
    found = losses(tmp_path / "run")
    assert [found[step] for step in range(17, 23)] == [
        whole[step] for step in range(17, 23)
    ]
    assert re.search(
        r"needs 144 training samples, .* of a run of 88: these keep their order, and the other 56",
        ended.out + ended.err,
    )
    assert run_file(tmp_path / "run", 36)["planned_samples"] == [88, 144]
    # Also for a start behind the planned ones, and for one with a smaller length.
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("24")
    other = ["--load", tmp_path / "run", "--save", tmp_path / "other"]
    train(1, words(corpus, *other, "--train-iters", 30))
    found_again = losses(tmp_path / "other")
    assert found_again == {step: found[step] for step in range(25, 31)}


def test_within_an_epoch_the_order_is_that_of_a_run_at_once(corpus, tmp_path):
    train(1, words(corpus, "--train-iters", 19, "--save", tmp_path / "whole"))
    train(1, words(corpus, "--train-iters", 6, "--save", tmp_path / "run"))
    load = ["--load", tmp_path / "run", "--save", tmp_path / "run"]
    train(1, words(corpus, "--train-iters", 19, *load))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_cyclic_order_that_changes_is_said(corpus, tmp_path):
    cyclic = ["--dataloader-type", "cyclic", "--save", tmp_path / "run"]
    train(1, words(corpus, "--train-iters", 22, *cyclic))
    load = [*cyclic, "--load", tmp_path / "run", "--train-iters", 50]
    [ended] = train(1, words(corpus, *load))
    assert re.search(
        r"order of the training samples changes here: --dataloader-type cyclic shuffles \d+ samples, and \d+ in",
        ended.out + ended.err,
    )


def test_another_batch_size_says_how_the_learning_rate_goes_on(tmp_path):
    """Iterations of the decay are samples: 20 of 4, and of 8 from step 10 on."""
    job = [
        *TINY,
        "--mock-data",
        "--train-iters",
        "20",
        "--lr",
        "1e-2",
        "--min-lr",
        "1e-3",
    ]
    job += ["--lr-warmup-iters", "4", "--save", str(tmp_path / "run")]
    train(1, [*job, "--exit-interval", "10"])
    load = ["--load", str(tmp_path / "run")]
    [ended] = train(1, [*job, *load, "--global-batch-size", "8"])
    assert (
        "the learning rate of the next step is 9.914e-03, and 7.222e-03 with the options of the checkpoint; that of "
        "the last step is 3.778e-03, and 1.000e-03. It decays until 160 samples, and until 80 there; 40 are done. "
        "--lr-decay-samples 80 keeps its end" in ended.out + ended.err
    ), ended.err
    rates = {r["step"]: r["learning_rate"] for r in records(tmp_path / "run")}
    assert rates[11] == pytest.approx(9.914e-3, rel=1e-3)
    # The same options continue without a word.
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    again = ["--save", str(tmp_path / "again")]
    [ended] = train(1, [*job, *load, *again])
    assert "of the checkpoint" not in ended.out + ended.err


@pytest.mark.plan
def test_pieces_grow_where_the_order_is_the_same():
    below_ten = lambda one, other: max(one, other) <= 10
    assert pieces_of([4], below_ten) == [4]
    never = lambda one, other: False
    assert pieces_of([4, 9, 15], never) == [4, 5, 6]
    always = lambda one, other: True
    assert pieces_of([4, 9, 15], always) == [15]
    assert pieces_of([4, 9, 15, 18], below_ten) == [9, 9]


@pytest.mark.plan
def test_a_continued_dataset_is_one_dataset_after_the_other():
    dataset = ContinuedDataset([range(10, 20), range(30, 40)], [4, 3])
    assert [dataset[i] for i in range(len(dataset))] == [10, 11, 12, 13, 30, 31, 32]


@pytest.mark.plan
@pytest.mark.parametrize("blend", [["0.3", "{}", "0.7", "{}"], ["1", "{}"], ["{}"]])
def test_continued_blends_begin_with_the_samples_of_their_checkpoint(corpus, blend):
    path = [word.format(corpus) for word in blend]
    more = ["--data-path", *path, "--split", "100,0,0", "--train-iters", "9"]
    config = read([*TINY, *CONSTANT, *more])
    tokenizer = make_tokenizer("NullTokenizer", vocab_size=VOCAB - 1)

    def samples(count, planned=()):
        made = build_datasets(config, (count, 0, 0), tokenizer, planned=planned).train
        return [made[i]["tokens"].tolist() for i in range(count)]

    planned = samples(88)
    continued = samples(144, [88, 144])
    assert continued[:88] == planned and samples(144)[:88] != planned
    # Behind them comes an order of its own, which later starts keep.
    assert continued[88:] != planned[:56]
    assert samples(300, [88, 144, 300])[:144] == continued
    # A shorter start keeps it, too.
    assert samples(60, [88]) == planned[:60]
