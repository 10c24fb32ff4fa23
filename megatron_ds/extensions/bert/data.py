"""`BERT_DATA`: runs of sentences as pairs of segments, in Megatron's order and with its random numbers.

A sample, padded to the sequence length s; all int64 [s] except the two flags:

    text          [CLS] A .. A [SEP] B .. B [SEP] 0 ..     some tokens hidden (masking.py)
    types           0   0    0   0   1    1   1   0 ..
    labels        the true token where one was chosen, else -1;  loss_mask: 1 there, else 0
    padding_mask    1   1    1   1   1    1   1   0 ..
    is_random     1 where A and B are swapped;  truncated: 1 where tokens were removed

Row i of the mapping names the sentences. All random numbers come from `RandomState(seed + i)`, so a sample is
a pure function of (corpus, documents, options, i).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...batch.batch import Batch
from ...data.kind import DataKind, Sample
from ...data.loading.cache import cached_arrays, default_cache
from ...data.samples.gpt_data import blank_batch
from ...data.text.indexed import IndexedDataset
from ...data.tokenizers import Tokenizer
from ...errors import DataError
from ...host.content_hash import content_hash
from .maps import LONG_SENTENCE, build_mapping
from .masking import Masking, WordPieces, mask_tokens, pieces_of
from .options import BertConfig

if TYPE_CHECKING:
    from ...config import RunConfig

SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
UNLABELLED = -1
MANY_EPOCHS = np.iinfo(np.int32).max - 1


@dataclass(frozen=True)
class BertOptions:
    """How BERT samples are made.

    pairs           True: two segments per sample; False: one
    short_seq_prob  share of samples that are shorter than `seq_length`
    """

    seq_length: int
    seed: int
    masking: Masking
    pairs: bool
    short_seq_prob: float = 0.1

    @property
    def least_sentences(self) -> int:
        """Sentences that a sample needs."""
        return 2 if self.pairs else 1


class BertDataset:
    """N samples for BERT.

    mapping  int [N, 3]: first sentence, last sentence + 1, target length of each sample
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        mapping: np.ndarray,
        pieces: WordPieces,
        options: BertOptions,
    ):
        self.corpus = corpus
        self.mapping = mapping
        self.pieces = pieces
        self.options = options

    def __len__(self) -> int:
        return len(self.mapping)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        first, stop, target = self.mapping[i].tolist()
        random = np.random.RandomState((self.options.seed + i) % 2**32)
        sentences = [self.corpus[at] for at in range(first, stop)]
        self._check(sentences, first)
        return make_sample(sentences, target, self.pieces, self.options, random)

    def _check(self, sentences: Sequence[np.ndarray], first: int) -> None:
        size = self.pieces.vocab_size
        for number, sentence in enumerate(sentences, first):
            if len(sentence) and not 0 <= sentence.min() <= sentence.max() < size:
                raise DataError(
                    f"sentence {number} holds token ids from {sentence.min()} to {sentence.max()}, outside "
                    f"the vocabulary of {size}: the corpus was made with another tokenizer. Give the flags "
                    "that megatron-ds preprocess had, or preprocess the text again."
                )


def make_sample(
    sentences: Sequence[np.ndarray],
    target: int,
    pieces: WordPieces,
    options: BertOptions,
    random: np.random.RandomState,
) -> dict[str, np.ndarray]:
    """Return a sample of these sentences, with at most `target` of their tokens, in Megatron's order of draws."""
    a, b, swapped = _segments(sentences, options.pairs, random)
    a, b, truncated = truncate(a, b, target, random)
    tail = [b, [pieces.sep]] if len(b) else []
    true = np.concatenate([[pieces.cls], a, [pieces.sep], *tail])
    hidden, chosen = mask_tokens(true, target, pieces, options.masking, random)
    row = lambda fill=0: np.full(options.seq_length, fill, np.int64)
    text = row(pieces.pad)
    types = row()
    labels = row(UNLABELLED)
    loss_mask = row()
    padding_mask = row()
    text[: len(true)], padding_mask[: len(true)] = hidden, 1
    types[len(a) + 2 : len(true)] = 1
    labels[chosen], loss_mask[chosen] = true[chosen], 1
    return {
        "text": text,
        "types": types,
        "labels": labels,
        "is_random": np.array(int(swapped)),
        "loss_mask": loss_mask,
        "padding_mask": padding_mask,
        "truncated": np.array(int(truncated)),
    }


def _segments(
    sentences: Sequence[np.ndarray], pairs: bool, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray, bool]:
    """(A, B, whether they are swapped); without pairs, A is all sentences."""
    pivot = len(sentences)
    swapped = False
    if pairs:
        pivot = random.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        swapped = bool(random.random_sample() < 0.5)
    a, b = (
        np.concatenate([np.empty(0, np.int64), *part])
        for part in (sentences[:pivot], sentences[pivot:])
    )
    return (b, a, swapped) if swapped else (a, b, swapped)


def truncate(
    a: np.ndarray, b: np.ndarray, target: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Remove tokens one by one from the front or back of the longer segment until `target` are left."""
    (start_a, stop_a), (start_b, stop_b) = (0, len(a)), (0, len(b))
    excess = len(a) + len(b) - target
    for from_front in random.random_sample(max(excess, 0)) < 0.5:
        if stop_a - start_a > stop_b - start_b:
            start_a, stop_a = (
                (start_a + 1, stop_a) if from_front else (start_a, stop_a - 1)
            )
        else:
            start_b, stop_b = (
                (start_b + 1, stop_b) if from_front else (start_b, stop_b - 1)
            )
    return a[start_a:stop_a], b[start_b:stop_b], excess > 0


def open_bert_dataset(
    corpus: IndexedDataset,
    documents: range,
    options: BertOptions,
    *,
    title: str,
    num_samples: int | None,
    cache: str | Path | None,
    pieces: WordPieces,
) -> BertDataset:
    """Return the dataset of a range of documents. Its mapping is read from the cache, or built and stored there.

    num_samples: at least so many, in whole epochs; None for one epoch.  Raises DataError where no document
    can be used.
    """
    # The name in the cache contains everything that determines the mapping.
    least = options.least_sentences
    directory = (
        Path(cache)
        if cache
        else default_cache(corpus.prefix).with_name("BertDataset_indices")
    )
    key = {
        "class": "BertDataset",
        **corpus.key(documents),
        "bounds": content_hash([corpus.document_indices]),
        "num_samples": num_samples,
        "sequence_length": options.seq_length,
        "random_seed": options.seed,
        "short_sequence_probability": options.short_seq_prob,
        "sentences": least,
    }

    # It is built only if the cache does not have it.
    def build() -> dict[str, np.ndarray]:
        corpus.check()
        bounds = corpus.document_indices[documents.start : documents.stop + 1]
        check_documents(bounds, corpus.lengths, least)
        return {
            "sample_index": build_mapping(
                bounds,
                corpus.lengths,
                num_epochs=1 if num_samples is None else MANY_EPOCHS,
                max_num_samples=2**62 if num_samples is None else num_samples,
                max_seq_length=options.seq_length - SPECIAL_TOKENS,
                short_seq_prob=options.short_seq_prob,
                seed=options.seed,
                min_num_sent=least,
            )
        }

    mapping = cached_arrays(directory, title, key, ("sample_index",), build)[
        "sample_index"
    ]
    return BertDataset(corpus, mapping, pieces, options)


def check_documents(bounds: np.ndarray, lengths: np.ndarray, least: int) -> None:
    """Raise DataError if no document gives a sample: `build_mapping` would not end."""
    counts = np.diff(bounds)
    enough = counts >= least
    if not enough.any():
        why = (
            "most likely the corpus was made without --split-sentences"
            if counts.max(initial=0) <= 1
            else "they are too short"
        )
        raise DataError(
            f"none of its {len(counts)} documents has {least} sentences, the least for a sample: "
            f"{why}. Make it again with megatron-ds preprocess --split-sentences, or train "
            "without pairs: --bert-no-binary-head."
        )
    for first, stop in zip(bounds[:-1][enough].tolist(), bounds[1:][enough].tolist()):
        if stop - first == 1 or lengths[first:stop].max() <= LONG_SENTENCE:
            return
    raise DataError(
        f"each of its {int(enough.sum())} documents with {least} sentences or more has a "
        f"sentence of more than {LONG_SENTENCE} tokens, and such documents are left out, as in "
        "Megatron. Split the text into sentences: megatron-ds preprocess --split-sentences."
    )


class MockBertDataset:
    """Samples that count upwards through both segments: order and masked tokens can be predicted.

    A pure function of (seed, i). Ids 0 to 3 are [PAD], [CLS], [SEP] and [MASK]; every third other id
    continues a word.
    """

    def __init__(self, num_samples: int, vocab_size: int, options: BertOptions):
        self.num_samples = num_samples
        self.options = options
        ids = np.arange(vocab_size)
        self.pieces = WordPieces(
            pad=0, cls=1, sep=2, mask=3, continues=(ids > 3) & (ids % 3 == 0)
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.RandomState((self.options.seed + i) % 2**32)
        most = self.options.seq_length - SPECIAL_TOKENS
        target = most if random.random_sample() >= 0.1 else random.randint(2, most + 1)
        ends = sorted({0, *random.randint(1, target, 2).tolist(), target})
        first = random.randint(0, self.pieces.vocab_size)
        step = random.randint(1, 5)
        words = 4 + (first + step * np.arange(target)) % (self.pieces.vocab_size - 4)
        sentences = [words[a:b] for a, b in zip(ends, ends[1:])]
        return make_sample(sentences, target, self.pieces, self.options, random)


def bert_batch(
    samples: Sequence[Sample],
    indices: Sequence[int],
    sample_ids: tuple[int, ...],
    training: bool,
) -> Batch:
    """Return the `Collator` of samples of `BertDataset`."""
    column = lambda key: torch.from_numpy(
        np.stack([sample[key] for sample in samples])
    )  # [b, s]
    text = column("text")
    return Batch(
        tokens=text,
        labels=column("labels").clamp_(min=0),
        loss_mask=column("loss_mask").float(),
        position_ids=torch.arange(text.shape[1]).expand_as(text),
        sample_ids=tuple(sample_ids),
        training=training,
        attention_mask=(column("padding_mask") == 0)[:, None, None, :],
        token_types=column("types"),
        sentence_order=column("is_random"),
    )


def _options(config: "RunConfig", seed: int) -> BertOptions:
    bert = config.of(BertConfig)
    return BertOptions(
        config.model.seq_length,
        seed,
        Masking(bert.mask_prob, bert.mask_max_ngram, bert.mask_whole_words),
        config.model.bert_binary_head,
        bert.short_seq_prob,
    )


def _open(
    corpus: IndexedDataset,
    documents: range,
    *,
    title: str,
    num_samples: int | None,
    config: "RunConfig",
    tokenizer: Tokenizer,
) -> BertDataset:
    return open_bert_dataset(
        corpus,
        documents,
        _options(config, config.train.seed),
        title=title,
        num_samples=num_samples,
        cache=config.data.data_cache_path,
        pieces=pieces_of(tokenizer),
    )


def _blank(samples: int, positions: int, device: torch.device | str = "cpu") -> Batch:
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(
        *shape, dtype=dtype, device=device
    )
    return replace(
        blank_batch(samples, positions, device),
        token_types=zeros(samples, positions),
        attention_mask=zeros(samples, 1, 1, positions, dtype=torch.bool),
        sentence_order=zeros(samples),
    )


BERT_DATA = DataKind(
    title="BertDataset",
    tokens="text",
    documents=lambda corpus: corpus.document_indices,
    mock=lambda count, config, tokenizer, seed: MockBertDataset(
        count, tokenizer.vocab_size, _options(config, seed)
    ),
    open=_open,
    collator=lambda config, tokenizer: bert_batch,
    blank=_blank,
    identity=lambda config: {
        **asdict(config.of(BertConfig)),
        "pairs": config.model.bert_binary_head,
    },
)
