"""Documents packed into samples: nothing lost, nothing twice, nothing mixed, little padding."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import parse
from megatron_ds.data.kind import PAD
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.data.samples.packing import (
    PackedDataset,
    build_packs,
    open_packed_dataset,
    pack_lengths,
)
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.tokenizers import build_tokenizer

pytestmark = pytest.mark.plan


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 50), max_size=20),
    st.integers(40, 60),
)
def test_every_piece_is_in_one_sample_and_no_sample_overflows(histogram, capacity):
    patterns, packed = pack_lengths(histogram, capacity), Counter()
    for lengths, count in patterns:
        assert sum(lengths) <= capacity and count > 0
        packed.update({n: count * k for n, k in Counter(lengths).items()})
    assert packed == histogram


def best_fit(lengths, capacity):
    """Number of samples by best fit decreasing, one piece after the other."""
    rooms = []
    for n in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= n]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else capacity) - n)
    return len(rooms)


@pytest.mark.parametrize("seed, mean", [(0, 3.0), (1, 4.0), (2, 5.0)])
def test_packing_by_histogram_is_as_tight_as_piece_by_piece(seed, mean):
    lengths = (
        np.clip(np.random.default_rng(seed).lognormal(mean, 1.0, 3000), 2, 257)
        .astype(int)
        .tolist()
    )
    samples = sum(count for _, count in pack_lengths(Counter(lengths), 257))
    assert samples == pytest.approx(best_fit(lengths, 257), rel=0.002)
    assert sum(lengths) / (samples * 257) > 0.99


def write(path, lengths):
    """Token t of document d is 100 d + t: a token tells where it comes from."""
    with IndexedWriter(path, np.int32) as writer:
        for d, n in enumerate(lengths):
            writer.add_document(np.arange(100 * d, 100 * d + n), [n])
    return IndexedDataset(path)


LENGTHS = [5, 1, 30, 9, 9, 2, 17, 8, 0, 3, 16, 33, 4]
S = 16


def predictions(dataset, start, stop):
    """(token, label) pairs that count in the loss of these samples, and how often each."""
    loader = Loader(dataset, GPTCollator(S), micro_batch_size=1)
    batch = loader.batch(start, stop - start)
    counted = batch.loss_mask.bool()
    return batch, Counter(
        zip(batch.tokens[counted].tolist(), batch.labels[counted].tolist())
    )


def test_every_token_but_a_documents_first_is_predicted_once_an_epoch_from_its_own_document(
    tmp_path,
):
    corpus = write(tmp_path / "c", LENGTHS)
    dataset = PackedDataset(
        corpus, build_packs(corpus.lengths, range(13), S, 1), S, 100, seed=1
    )
    n = dataset.per_epoch
    expected = Counter(
        (100 * d + t, 100 * d + t + 1)
        for d, length in enumerate(LENGTHS)
        for t in range(length - 1)
    )
    for epoch in range(3):
        assert predictions(dataset, epoch * n, (epoch + 1) * n)[1] == expected
    orders = [
        tuple(tuple(dataset[epoch * n + i]["tokens"]) for i in range(n))
        for epoch in range(2)
    ]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_attention_and_positions_keep_to_each_document(tmp_path):
    corpus = write(tmp_path / "c", LENGTHS)
    dataset = PackedDataset(
        corpus, build_packs(corpus.lengths, range(13), S, 1), S, None, seed=1
    )
    batch, _ = predictions(dataset, 0, len(dataset))
    for tokens, ids, positions, mask in zip(
        batch.tokens, batch.document_ids, batch.position_ids, batch.loss_mask
    ):
        for number in ids.unique().tolist():
            here = ids == number
            assert positions[here].tolist() == list(range(int(here.sum())))
            if mask[here].any():
                assert (
                    len({t // 100 for t in tokens[here].tolist()}) == 1
                    and (tokens[here].diff() == 1).all()
                )
    assert batch.document_ids.max() >= 2, "no sample holds several"


def test_a_range_of_documents_is_packed_by_itself_and_the_seed_mixes_them(tmp_path):
    corpus = write(tmp_path / "c", [5] * 40)
    packs = [build_packs(corpus.lengths, range(10, 30), 9, seed) for seed in (1, 1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(packs[0], packs[1]))
    assert not np.array_equal(packs[0].members, packs[2].members)
    assert (
        sorted(packs[0].document[packs[0].members]) == list(range(10, 30))
        and len(packs[0].bounds) == 11
    )


def test_packs_are_cached_and_hold_as_many_samples_as_are_wanted(tmp_path):
    corpus = write(tmp_path / "c", LENGTHS)
    options = dict(
        title="GPTDataset-train", seq_length=S, seed=1, cache=tmp_path / "cache"
    )
    first = open_packed_dataset(corpus, range(13), num_samples=50, **options)
    again = open_packed_dataset(corpus, range(13), num_samples=70, **options)
    assert (len(first), len(again)) == (50, 70) and len(
        list((tmp_path / "cache").glob("*.npy"))
    ) == 5
    assert all(
        np.array_equal(first[i]["tokens"], again[i]["tokens"]) for i in range(50)
    )
    assert (first[3]["tokens"] >= PAD).all() and len(first[3]["tokens"]) == S + 1


def test_the_flag_packs_each_corpus_of_a_blend(tmp_path):
    corpora = [str(write(tmp_path / name, [5] * 40).prefix) for name in "ab"]
    job = [
        *(
            "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --lr 1 --micro-batch-size 1 "
            "--train-iters 30 --eval-iters 0 --seq-length 14 --split 1,0,0 "
            "--tokenizer-type NullTokenizer --vocab-size 9999 --data-path 3"
        ).split(),
        corpora[0],
        "1",
        corpora[1],
    ]
    samples = {}
    for flags in ((), ("--pack-documents",)):
        config = parse([*job, *flags])
        samples[flags] = build_datasets(
            config, (30, 0, 0), build_tokenizer(config.data, config.model)
        ).train[0]
    cut, packed = samples.values()
    assert (
        set(cut) == {"tokens"}
        and packed["document_ids"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    )


def test_ten_million_pieces_are_planned_in_a_moment():
    """The work depends on the histogram, not on how many pieces there are."""
    histogram = {n: 10_000 * (2050 - n) // 2050 + 1 for n in range(2, 2050)}
    patterns = pack_lengths(histogram, 2049)
    tokens = sum(n * count for n, count in histogram.items())
    assert (
        tokens / (2049 * sum(count for _, count in patterns)) > 0.99
        and len(patterns) < 20_000
    )
