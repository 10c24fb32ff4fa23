"""BERT samples against megatron-core's: equal on random corpora and options, and how long one takes.

    python benchmarks/bert_samples.py --cases 1000
    python benchmarks/bert_samples.py --cases 0 --seq-length 512 --rounds 3

Needs an environment with megatron-core. Sentences are random word pieces; both make their samples from the
same rows of the same mapping, in turns.

Not compared is what megatron-core differs from its documentation: where a token was replaced by a random one,
and that one is [PAD], its padding mask hides the place; ours hides what is padding.
"""

import argparse
import sys
import time
from types import SimpleNamespace

import numpy as np

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.extensions.bert.data import BertDataset, BertOptions
from megatron_ds.extensions.bert.maps import build_mapping
from megatron_ds.extensions.bert.masking import Masking, WordPieces

PAD = 0
CLS = 101
SEP = 102
MASK = 103


def pieces(vocab_size: int) -> WordPieces:
    continues = np.random.default_rng(0).random(vocab_size) < 0.3
    continues[[PAD, CLS, SEP, MASK]] = False
    return WordPieces(CLS, SEP, MASK, PAD, continues)


def corpus(random: np.random.Generator, documents: int, vocab_size: int, longest: int):
    """(sentences, document bounds, sizes of the sentences)."""
    counts = random.integers(1, 9, documents)
    sizes = random.integers(1, longest, counts.sum()).astype(np.int32)
    sentences = [
        random.integers(104, vocab_size, size).astype(np.uint16) for size in sizes
    ]
    return sentences, np.concatenate([[0], np.cumsum(counts)]), sizes


def both(
    sentences,
    mapping,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    masking: Masking,
    pairs: bool,
):
    """(ours, theirs): two datasets over the same rows."""
    from megatron.core.datasets.bert_data import BERTMaskedWordPieceDataset

    known = pieces(vocab_size)
    ours = BertDataset(
        sentences, mapping, known, BertOptions(seq_length, seed, masking, pairs)
    )
    theirs = object.__new__(BERTMaskedWordPieceDataset)
    texts = {i: f"##{i}" if known.continues[i] else str(i) for i in range(vocab_size)}
    # Megatron's dataset, without the files that its own initialization reads.
    theirs.dataset = sentences
    theirs.sample_index = mapping
    theirs._pad_token_id = PAD
    theirs.token_lookup = list(texts)
    theirs.config = SimpleNamespace(
        tokenizer=SimpleNamespace(
            cls=CLS, sep=SEP, mask=MASK, pad=PAD, inv_vocab=texts
        ),
        sequence_length=seq_length,
        random_seed=seed,
        classification_head=pairs,
        masking_probability=masking.probability,
        masking_max_ngram=masking.max_ngram,
        masking_do_full_word=masking.whole_words,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    return ours, theirs


def differing(ours: dict, theirs: dict) -> list[str]:
    """Keys whose values differ."""
    hidden_by_chance = (ours["text"] == PAD) & (ours["padding_mask"] == 1)
    theirs["padding_mask"] = np.where(hidden_by_chance, 1, theirs["padding_mask"])
    return [key for key in theirs if not np.array_equal(ours[key], theirs[key])]


def compare(cases: int) -> int:
    random = np.random.default_rng(1)
    samples = 0
    wrong = 0
    for case in range(cases):
        vocab_size = int(random.integers(120, 2000))
        seq_length = int(random.integers(8, 130))
        pairs = bool(random.integers(2))
        seed = int(random.integers(2**31 - 2))
        masking = Masking(
            float(random.choice([0.05, 0.15, 0.4])),
            int(random.integers(1, 5)),
            bool(random.integers(4)),
        )
        # A corpus of random sentences, and the samples of it.
        sentences, bounds, sizes = corpus(
            random, 4, vocab_size, int(random.integers(2, 60))
        )
        mapping = build_mapping(
            bounds,
            sizes,
            num_epochs=1,
            max_num_samples=10**9,
            max_seq_length=seq_length - 3,
            short_seq_prob=float(random.choice([0.0, 0.1, 0.5])),
            seed=seed,
            min_num_sent=1 + pairs,
        )
        ours, theirs = both(
            sentences,
            mapping,
            seq_length=seq_length,
            seed=seed,
            vocab_size=vocab_size,
            masking=masking,
            pairs=pairs,
        )
        # Each sample of both.
        for i in range(len(mapping)):
            samples += 1
            found = differing(ours[i], theirs[i])
            wrong += bool(found)
            if found and wrong < 5:
                print(
                    f"case {case}, sample {i}, {masking}, pairs {pairs}: {', '.join(found)} differ"
                )
    print(f"{cases} cases, {samples} samples: {wrong} differ")
    return wrong


def measure(seq_length: int, rounds: int, count: int = 200) -> None:
    sentences, bounds, sizes = corpus(np.random.default_rng(2), 20 * count, 30522, 40)
    mapping = build_mapping(
        bounds,
        sizes,
        num_epochs=1,
        max_num_samples=10**9,
        max_seq_length=seq_length - 3,
        short_seq_prob=0.1,
        seed=1,
        min_num_sent=2,
    )
    sets = both(
        sentences,
        mapping,
        seq_length=seq_length,
        seed=1,
        vocab_size=30522,
        masking=Masking(),
        pairs=True,
    )
    times = [[], []]
    for _ in range(rounds):
        for dataset, taken in zip(sets, times):
            start = time.perf_counter()
            for i in range(count):
                dataset[i]
            taken.append((time.perf_counter() - start) / count * 1e3)
    for name, taken in zip(("ours", "megatron-core"), times):
        print(
            f"{name:14} {np.median(taken):.3f} ms a sample of {seq_length} "
            f"({min(taken):.3f}–{max(taken):.3f})"
        )
    print(f"ratio of medians {np.median(times[1]) / np.median(times[0]):.1f}")


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=1000,
        help="random corpora to compare (default 1000)",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        default=512,
        help="of the samples that are timed (default 512)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="times that both are timed, in turns (default 0)",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    wrong = compare(args.cases) if args.cases else 0
    if args.rounds:
        measure(args.seq_length, args.rounds)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main_guard(lambda: run(parse_arguments())))
