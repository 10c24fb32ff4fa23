"""BERT's samples: Megatron's values, what masking promises, and what bad corpora are told."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.bert import data
from megatron_ds.extensions.bert.data import (
    BERT_DATA,
    BertDataset,
    BertOptions,
    MockBertDataset,
    bert_batch,
    open_bert_dataset,
    truncate,
)
from megatron_ds.extensions.bert.masking import (
    Masking,
    WordPieces,
    candidates,
    mask_tokens,
    pieces_of,
)
from megatron_ds.extensions.corpora.vocabulary_training import train_word_pieces

pytestmark = pytest.mark.plan

VOCAB = 60
IDS = np.arange(VOCAB)
PIECES = WordPieces(cls=1, sep=2, mask=3, pad=0, continues=(IDS % 3 == 0) & (IDS >= 5))
SIZES = [5, 4, 6, 3, 9, 2, 7]
ENDS = np.cumsum(SIZES)
STREAM = 5 + (7 * np.arange(ENDS[-1]) ** 2) % (VOCAB - 5)
SENTENCES = [
    STREAM[end - size : end].astype(np.uint16) for end, size in zip(ENDS, SIZES)
]
MAPPING = np.array([[0, 3, 17], [3, 5, 17], [4, 7, 12], [0, 2, 17]], np.uint32)
SINGLE = dict(masking=Masking(0.4, max_ngram=2, whole_words=False), pairs=False)

# What megatron-core 0.16.1 makes of them with seed 1234 and 20 positions: text up to the padding, {position:
# label}, length of the first segment with [CLS] and [SEP], is_random, truncated.
PAIRS = [
    (
        [1, 22, 45, 27, 23, 33, 57, 2, 5, 12, 33, 3, 7, 15, 37, 18, 3, 2],
        {11: 13, 16: 13},
        8,
        1,
        0,
    ),
    ([1, 40, 37, 48, 2, 18, 57, 55, 12, 38, 3, 22, 35, 3, 2], {10: 23, 13: 7}, 5, 0, 0),
    ([1, 38, 23, 22, 35, 7, 48, 2, 3, 22, 23, 38, 12, 55, 2], {8: 35}, 8, 0, 1),
    ([1, 5, 12, 33, 13, 7, 2, 15, 3, 3, 13, 2], {8: 37, 9: 18}, 7, 0, 0),
]
SINGLES = [
    (
        [1, 3, 12, 3, 13, 7, 15, 37, 18, 13, 22, 45, 3, 3, 3, 3, 2],
        {1: 5, 3: 33, 12: 27, 13: 23, 14: 33, 15: 57},
        17,
        0,
        0,
    ),
    (
        [1, 3, 37, 48, 18, 59, 3, 15, 38, 23, 3, 37, 7, 2],
        {1: 40, 5: 57, 6: 55, 7: 12, 10: 22, 11: 35},
        14,
        0,
        0,
    ),
    (
        [1, 3, 3, 23, 22, 35, 3, 3, 48, 7, 35, 22, 23, 2],
        {1: 12, 2: 38, 6: 7, 7: 48},
        14,
        0,
        1,
    ),
    ([1, 5, 12, 33, 3, 7, 3, 3, 18, 13, 2], {1: 5, 4: 13, 6: 15, 7: 37}, 11, 0, 0),
]


def dataset(
    sentences=SENTENCES,
    mapping=MAPPING,
    seq_length=20,
    seed=1234,
    masking=Masking(),  # noqa: B008
    pairs=True,
):
    return BertDataset(
        sentences, mapping, PIECES, BertOptions(seq_length, seed, masking, pairs)
    )


@pytest.mark.parametrize(
    "options, golden", [({}, PAIRS), (SINGLE, SINGLES)], ids=["pairs", "one segment"]
)
def test_samples_have_the_values_of_megatron(options, golden):
    samples = dataset(**options)
    assert len(samples) == len(golden)
    for i, (text, labels, first, swapped, truncated) in enumerate(golden):
        sample, rest = samples[i], [0] * (20 - len(text))
        assert (
            sample["text"].tolist() == text + rest and sample["text"].dtype == np.int64
        )
        assert (
            sample["types"].tolist() == [0] * first + [1] * (len(text) - first) + rest
        )
        assert sample["labels"].tolist() == [labels.get(at, -1) for at in range(20)]
        assert sample["loss_mask"].tolist() == [int(at in labels) for at in range(20)]
        assert sample["padding_mask"].tolist() == [1] * len(text) + rest
        assert (sample["is_random"], sample["truncated"]) == (swapped, truncated)


def test_a_sample_is_a_function_of_its_number_alone():
    samples = dataset()
    later, first = samples[3], samples[0]
    assert all(np.array_equal(first[key], dataset()[0][key]) for key in first)
    assert np.array_equal(later["text"], dataset()[3]["text"])
    assert any(
        (dataset(seed=seed)[0]["text"] != first["text"]).any() for seed in (1, 2)
    )


def test_words_are_what_stands_between_the_pieces_that_continue_them():
    tokens = np.array(
        [1, 7, 9, 12, 8, 2, 6, 10, 2]
    )  # [CLS] a ##b ##c d [SEP] ##e f [SEP]
    places, starts = candidates(tokens, PIECES, whole_words=True)
    words = [places[a:b].tolist() for a, b in zip(starts, [*starts[1:], len(places)])]
    assert words == [[1, 2, 3], [4, 6], [7]]
    assert len(candidates(tokens, PIECES, whole_words=False)[1]) == 6


def test_chosen_tokens_are_whole_words_in_the_asked_number_and_hidden_by_the_rule():
    random = np.random.RandomState(0)
    counts = np.zeros(4)
    chosen_words = []
    for _ in range(400):
        tokens = np.concatenate([[1], random.randint(5, VOCAB, 100), [2]])
        hidden, chosen = mask_tokens(tokens, 100, PIECES, Masking(), random)
        assert len(chosen) <= 15 and set(np.flatnonzero(hidden != tokens)) <= set(
            chosen.tolist()
        )
        places, starts = candidates(tokens, PIECES, True)
        bounds = [*starts, len(places)]
        is_chosen = np.isin(places, chosen)
        for a, b in zip(bounds, bounds[1:]):
            assert is_chosen[a:b].all() or not is_chosen[a:b].any()
        masked, kept = hidden[chosen] == 3, hidden[chosen] == tokens[chosen]
        counts += [len(chosen), masked.sum(), kept.sum(), (~masked & ~kept).sum()]
        chosen_words.append(len(chosen))
    total, masked, kept, replaced = counts
    assert np.mean(chosen_words) > 14  # of at most 15
    assert masked / total == pytest.approx(
        0.8, abs=0.02
    ) and kept / total == pytest.approx(0.1, abs=0.02)
    assert replaced / total == pytest.approx(0.1, abs=0.02)


def test_lengths_of_ngrams_are_as_one_over_n():
    assert np.allclose(np.diff([0, *Masking().lengths]), np.array([6, 3, 2]) / 11)
    assert Masking(max_ngram=1).lengths.tolist() == [1.0]


def test_a_target_shorter_than_one_token_of_masking_chooses_none():
    hidden, chosen = mask_tokens(
        np.array([1, 8, 2]), 2, PIECES, Masking(), np.random.RandomState(0)
    )
    assert len(chosen) == 0 and hidden.tolist() == [
        1,
        8,
        2,
    ]  # 0.15 × 2 tokens, as in Megatron
    assert (
        len(
            mask_tokens(
                np.array([1, 8, 2]), 20, PIECES, Masking(), np.random.RandomState(0)
            )[1]
        )
        == 1
    )


def test_truncation_takes_from_the_ends_of_the_longer_segment():
    random = np.random.RandomState(0)
    for _ in range(50):
        m, n, target = random.randint(1, 30, 3)
        a, b = np.arange(m), 100 + np.arange(n)
        x, y, truncated = truncate(a, b, target, random)
        assert truncated == (m + n > target) and len(x) + len(y) == min(m + n, target)
        assert (np.diff(x) == 1).all() and (np.diff(y) == 1).all()
        if truncated and min(m, n) > target // 2:
            assert abs(len(x) - len(y)) <= 1
    starts = {truncate(np.arange(9), np.arange(0), 5, random)[0][0] for _ in range(60)}
    assert starts == {0, 1, 2, 3, 4}


def write(prefix, documents):
    """Documents of sentences of these sizes."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for sizes in documents:
            writer.add_document(5 + np.arange(sum(sizes)) % (VOCAB - 5), sizes)
    return IndexedDataset(prefix)


def open_dataset(corpus, samples=None, pairs=True, documents=None, **changed):
    options = BertOptions(
        **{"seq_length": 32, "seed": 7, "masking": Masking(), "pairs": pairs, **changed}
    )
    return open_bert_dataset(
        corpus,
        documents or range(corpus.num_documents),
        options,
        title="BertDataset-train",
        num_samples=samples,
        cache=None,
        pieces=PIECES,
    )


def test_samples_are_sentences_of_one_document_of_the_part_and_enough_of_them(
    tmp_path, monkeypatch
):
    corpus = write(tmp_path / "c", [[9, 8, 12, 20, 5, 7]] * 5 + [[4]])
    samples = open_dataset(corpus, samples=40, documents=range(1, 4))
    assert len(samples) >= 40
    bounds = corpus.document_indices.tolist()
    for first, stop, target in samples.mapping.tolist():
        document = max(d for d in range(6) if bounds[d] <= first)
        assert (
            1 <= document < 4
            and stop <= bounds[document + 1]
            and stop - first >= 2
            and 2 <= target <= 29
        )
    assert all(
        set(samples[i]["text"]) <= set(IDS) and samples[i]["padding_mask"].sum() <= 32
        for i in range(40)
    )
    monkeypatch.setattr(
        data, "build_mapping", lambda *a, **k: pytest.fail("built again")
    )
    again = open_dataset(corpus, samples=40, documents=range(1, 4))
    assert np.array_equal(again.mapping, samples.mapping)
    with pytest.raises(pytest.fail.Exception):
        open_dataset(corpus, samples=40, documents=range(1, 4), short_seq_prob=0.2)


def test_maps_are_built_again_for_other_documents_of_the_same_sentences(tmp_path):
    open_dataset(write(tmp_path / "c", [[4, 4], [4, 4, 4, 4]]), samples=4)
    corpus = write(tmp_path / "c", [[4, 4, 4, 4], [4, 4]])
    samples = open_dataset(corpus, samples=4)
    bounds = corpus.document_indices
    documents = np.searchsorted(bounds, samples.mapping[:, :2], side="right")
    assert (documents[:, 0] == np.searchsorted(bounds, samples.mapping[:, 1])).all()


@pytest.mark.parametrize(
    "documents, pairs, said",
    [
        (
            [[40], [30], [50]],
            True,
            "none of its 3 documents has 2 sentences.*without --split-sentences.*--bert-no-binary-head",
        ),
        (
            [[3, 600], [700, 2]],
            True,
            "each of its 2 documents with 2 sentences or more has a sentence of more than 512",
        ),
        ([[]], False, "none of its 1 documents has 1 sentences"),
    ],
)
def test_a_corpus_without_a_usable_document_is_told_what_to_do(
    tmp_path, documents, pairs, said
):
    with pytest.raises(DataError, match=said):
        open_dataset(write(tmp_path / "c", documents), samples=10, pairs=pairs)


def test_documents_of_one_sentence_serve_a_model_without_pairs(tmp_path):
    samples = open_dataset(write(tmp_path / "c", [[40], [30], [50]]), pairs=False)
    assert len(samples) == 3 and not any(
        samples[i]["types"].any() or samples[i]["is_random"] for i in range(3)
    )


def test_word_pieces_come_from_a_trained_vocabulary_and_other_tokenizers_are_refused(
    tmp_path,
):
    train_word_pieces(
        ["the reader reads, the writer writes; readers and writers unite"] * 5,
        60,
        tmp_path / "t",
    )
    tokenizer = make_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "t")
    )
    pieces = pieces_of(tokenizer)
    assert (pieces.pad, pieces.cls, pieces.sep, pieces.mask) == (
        0,
        2,
        3,
        4,
    ) and pieces.vocab_size == tokenizer.vocab_size
    lines = (tmp_path / "t" / "vocab.txt").read_text().splitlines()
    assert (
        [i for i, line in enumerate(lines) if line.startswith("##")]
        == np.flatnonzero(pieces.continues).tolist()
        != []
    )
    with pytest.raises(
        ConfigError,
        match=r"NullTokenizer has no \[CLS\] and no \[SEP\].*BertWordPieceLowerCase",
    ):
        pieces_of(make_tokenizer("NullTokenizer", vocab_size=50))
    with pytest.raises(ConfigError, match="--vocab-size 5 is too small"):
        train_word_pieces(["x"], 5, tmp_path / "u")


BERT = (
    "--model bert --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 32 "
    "--micro-batch-size 1 --lr 1 --train-iters 1"
).split()


def test_the_parts_of_a_corpus_are_cut_by_documents_and_blends_mix_them(tmp_path):
    write(tmp_path / "a", [[9, 8, 12]] * 10)
    write(tmp_path / "b", [[7, 7, 7, 7]] * 6)
    words = ["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")]
    config = parse(
        [
            *BERT,
            "--data-path",
            *words,
            *"--split 8,2,0 --tokenizer-type NullTokenizer --vocab-size 60".split(),
        ]
    )
    tokenizer = SimpleNamespace(
        vocab={"[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[PAD]": 0}, vocab_size=VOCAB
    )
    parts = build_datasets(config, (30, 6, 0), tokenizer, BERT_DATA)
    a, b = parts.train.datasets
    assert (
        len(parts.train) == 30
        and len(a) >= 15
        and a.mapping[:, 1].max() <= 8 * 3
        and b.mapping[:, 1].max() <= 5 * 4
    )
    assert parts.valid.datasets[0].mapping[:, 0].min() >= 8 * 3 and parts.test is None
    with pytest.raises(
        DataError,
        match=r"--data-path .*a: sentence \d+ holds token ids .* vocabulary of 20",
    ):
        small = SimpleNamespace(vocab=tokenizer.vocab, vocab_size=20)
        build_datasets(config, (30, 6, 0), small, BERT_DATA)


def test_a_batch_hides_padding_and_counts_masked_tokens_only():
    samples = dataset()
    batch = bert_batch([samples[i] for i in (0, 3)], (0, 3), (10, 11), True)
    assert batch.tokens.tolist() == [
        samples[0]["text"].tolist(),
        samples[3]["text"].tolist(),
    ]
    assert batch.attention_mask.shape == (2, 1, 1, 20) and batch.attention_mask.sum(
        -1
    ).flatten().tolist() == [2, 8]
    assert (
        batch.labels.min() == 0
        and batch.loss_mask.sum() == 4
        and batch.loss_mask.dtype == torch.float32
    )
    assert batch.sentence_order.tolist() == [1, 0] and batch.token_types.sum(
        -1
    ).tolist() == [10, 5]
    second = batch.split(1)[1]
    assert (
        second.sample_ids == (11,)
        and second.sentence_order.tolist() == [0]
        and second.token_types.shape == (1, 20)
    )
    assert torch.equal(second.attention_mask, batch.attention_mask[1:])


@pytest.mark.parametrize("pairs", [True, False])
def test_mock_samples_are_pure_and_within_their_sizes(pairs):
    made = MockBertDataset(30, 40, BertOptions(16, 3, Masking(), pairs))
    swapped = 0
    for i in range(30):
        sample = made[i]
        assert all(np.array_equal(sample[key], made[i][key]) for key in sample)
        assert (
            sample["text"].max() < 40
            and sample["text"][0] == 1
            and sample["padding_mask"].sum() >= 4
        )
        swapped += sample["is_random"]
    assert (5 < swapped < 25) == pairs


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["--eod-mask-loss"],
            "--eod-mask-loss applies to samples of several documents",
        ),
        (
            ["--no-position-embedding"],
            "without position embeddings the order of tokens would be lost",
        ),
        (["--seq-length", "6"], "--seq-length 8 or more"),
        (
            ["--model", "gpt", "--bert-no-binary-head"],
            "--bert-no-binary-head has no effect without --model bert",
        ),
        (["--mask-prob", "1.5"], "mask-prob"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        parse([*BERT, "--mock-data", "--vocab-size", "60", *words])
