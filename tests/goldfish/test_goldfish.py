"""The tokens that the goldfish loss drops are those of the fork's formula, and depend on the tokens before them."""

import numpy as np
import pytest
import torch

from megatron_ds.config.parse import parse
from megatron_ds.data.kind import PAD
from megatron_ds.data.loading.datasets import Datasets
from megatron_ds.data.samples.gpt_data import GPT_DATA, MockDataset
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.goldfish.goldfish_dataset import dropped, forgetful
from megatron_ds.features import changed_samples
from megatron_ds.training.pretrain import KNOWN_NAMES, RULES

pytestmark = pytest.mark.plan

LENGTH, VOCAB = 64, 50_000
RUN = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --micro-batch-size 1 "
    f"--train-iters 9 --lr 1e-3 --mock-data --vocab-size {VOCAB}"
)


def parsed(words):
    return parse(f"{RUN} {words}".split(), 1, known=KNOWN_NAMES, rules=RULES, env={})


def in_torch(labels, k, h):
    """The formula of the fork: products of windows, which wrap, in a table of uniform numbers."""
    table = torch.rand(
        1_000_003, generator=torch.Generator().manual_seed(2_971_215_073)
    )
    hashed = table[labels.unfold(0, h, 1).prod(dim=-1) % 1_000_003]
    return torch.cat([torch.zeros(h - 1, dtype=torch.bool), hashed < 1 / k])


@pytest.mark.parametrize("k, h", [(4, 13), (50, 50), (3, 1), (1, 2)])
def test_the_dropped_labels_are_those_of_the_fork(k, h):
    labels = np.random.default_rng(0).integers(0, VOCAB, 3000)
    found = dropped(labels, k, h)
    assert np.array_equal(found, in_torch(torch.from_numpy(labels), k, h).numpy())
    share = found[h - 1 :].mean()
    assert share == pytest.approx(1 / k, abs=0.03)


def test_the_same_passage_loses_the_same_tokens_wherever_it_stands():
    random = np.random.default_rng(1)
    passage = random.integers(0, VOCAB, 200)
    first, second = (
        dropped(np.concatenate([random.integers(0, VOCAB, n), passage]), 4, 5)[n:]
        for n in (10, 37)
    )
    assert np.array_equal(first[4:], second[4:]) and first[4:].any()


def batch_of(words):
    config = parsed(words)
    tokenizer = NullTokenizer(VOCAB - 1)
    datasets = Datasets(
        MockDataset(4, seq_length=LENGTH, vocab_size=VOCAB, eod=VOCAB - 1, seed=1),
        None,
        None,
    )
    for change in changed_samples(config):
        datasets = change.change(datasets, config, tokenizer)
    samples = [datasets[0][i] for i in range(4)]
    collate = GPT_DATA.collator(config, tokenizer)
    return samples, collate(samples, range(4), tuple(range(4)), True)


def test_a_batch_counts_the_other_tokens():
    samples, batch = batch_of("--goldfish-loss --goldfish-k 3 --goldfish-h 4")
    for row, sample in enumerate(samples):
        labels = torch.from_numpy(sample["tokens"][1:])
        assert torch.equal(batch.loss_mask[row] == 0, in_torch(labels, 3, 4))
    _, plain = batch_of("")
    assert plain.loss_mask.all() and torch.equal(plain.tokens, batch.tokens)


def test_masks_of_conversations_stay_and_padding_is_token_0():
    class Masked:
        def __len__(self):
            return 1

        def __getitem__(self, i):
            tokens = np.array([5, 6, 7, 8, PAD, PAD])
            return {"tokens": tokens, "loss_mask": np.array([0.0, 1, 0, 1, 1, 1])}

    config = parsed("--goldfish-loss --goldfish-k 1 --goldfish-h 3")
    sample = forgetful(Datasets(Masked(), None, None), config, None)[0][0]
    # The first two labels have no context of three; all others are dropped.
    assert sample["loss_mask"].tolist() == [0, 1, 0, 0, 0, 0]
    assert sample["tokens"].tolist() == [5, 6, 7, 8, PAD, PAD]


@pytest.mark.parametrize(
    "words, says",
    [
        ("--goldfish-loss --goldfish-h 65", "no token has so many before it"),
        ("--goldfish-k 3", "has no effect without --goldfish-loss"),
        ("--goldfish-loss --goldfish-k 0", "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed(words)


def test_a_checkpoint_remembers_which_tokens_count():
    [change] = changed_samples(parsed("--goldfish-loss --goldfish-h 13"))
    assert change.identity(parsed("--goldfish-loss --goldfish-h 13")) == {
        "goldfish": [50, 13]
    }
