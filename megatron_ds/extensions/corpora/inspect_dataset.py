"""Show the contents of a `.bin/.idx` corpus, and check it for damage.

    megatron-ds inspect corpus_text_document
    megatron-ds inspect corpus_text_document --document 7 --tokenizer-type HuggingFaceTokenizer \\
        --tokenizer-model tokenizer/
    megatron-ds inspect *_text_document.idx --check

Of a corpus of conversations, --document shows the tokens that are learned in green, or in ⟦ ⟧ where the
output is no terminal.

Counts documents, sequences and tokens, and draws a histogram of document lengths. --check reads every row of
the index, and all tokens if there are checksums or the ids could be negative. The .bin/.idx pair holds no
checksums, as in Megatron; megatron-ds preprocess writes them to PREFIX.json, and --write-checksums adds them
to other corpora.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.text.mask_file import LossMasks, mask_path
from megatron_ds.data.tokenizers import TOKENIZERS, Tokenizer, make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.corpora.corpus_record import (
    CorpusRecord,
    check_sums,
    read_record,
    record_of,
    record_path,
)

ROWS = 1 << 20  # documents read together
BAR = 40  # characters of the longest bar
SHOWN_TOKENS = 200
SHOWN_FILES = 5
# Before and after tokens that are learned.
COLORS = ("\x1b[32m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")
TOKENIZER_FLAGS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")


def make_parser() -> Arguments:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # Without any of these flags the sizes are printed.
    add("prefix", nargs="+", help="prefix of a .bin/.idx pair, or either file's name")
    add(
        "--check",
        action="store_true",
        help="verify every offset and checksum; exit code 2 if one is wrong",
    )
    add(
        "--write-checksums",
        action="store_true",
        help="write PREFIX.json with checksums of the files as they are now, if there is none. Do not use it "
        "after a doubtful copy: existing damage is not noticed",
    )
    add(
        "--document",
        type=int,
        metavar="N",
        help="show this document, from 0; negative numbers count from the end",
    )
    add(
        "--tokens",
        type=int,
        default=SHOWN_TOKENS,
        metavar="N",
        help=f"how many of its tokens to show (default {SHOWN_TOKENS})",
    )
    add(
        "--tokenizer-type",
        help=f"the tokenizer of the corpus, to show its text: one of {', '.join(TOKENIZERS)}",
    )
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json, its folder, or a sentencepiece .model",
    )
    add("--vocab-file", metavar="FILE", help="vocab.json or vocab.txt")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of ids, for NullTokenizer only",
    )
    return parser


def document_lengths(corpus: IndexedDataset) -> Iterator[np.ndarray]:
    """Tokens of each document, int64, ROWS at a time: the index may be larger than memory."""
    size = corpus.num_tokens * corpus.dtype.itemsize
    item = corpus.dtype.itemsize
    for first in range(0, corpus.num_documents, ROWS):
        bounds = corpus.document_indices[first : first + ROWS + 1]
        starts = np.full(len(bounds), size, np.int64)
        inside = bounds < len(corpus)
        starts[inside] = corpus.offsets[bounds[inside]]
        yield np.diff(starts) // item


def histogram(corpus: IndexedDataset) -> tuple[np.ndarray, int, int]:
    """(documents by length, the shortest, the longest). Entry 0: without tokens; entry k: of 2^(k−1) to 2^k −
    1."""
    counts = np.zeros(64, np.int64)
    least = None
    most = 0
    for lengths in document_lengths(corpus):
        least = int(lengths.min() if least is None else min(least, lengths.min()))
        most = max(most, int(lengths.max()))
        bits = np.zeros(len(lengths), np.int64)
        bits[lengths > 0] = np.floor(np.log2(lengths[lengths > 0])).astype(np.int64) + 1
        counts += np.bincount(bits, minlength=64)
    return np.trim_zeros(counts, "b"), least or 0, most


def _span(k: int) -> str:
    """Lengths that entry k of a histogram counts."""
    if k < 2:
        return ("none", "1")[k]
    return f"{1 << k - 1:,} to {(1 << k) - 1:,}"


def describe(corpus: IndexedDataset, record: CorpusRecord | None) -> None:
    """Print the sizes of a corpus and how it was made."""
    counts, least, most = histogram(corpus)
    print(
        f"{corpus.prefix}: {corpus.num_documents:,} documents, {len(corpus):,} sequences, "
        f"{corpus.num_tokens:,} tokens of {corpus.dtype.newbyteorder('=')}"
    )
    print(
        f"tokens of a document: {least:,} to {most:,}, "
        f"{corpus.num_tokens / max(1, corpus.num_documents):,.1f} on average"
    )
    masks = masks_of(corpus)
    if masks:
        learned = masks.count()
        share = learned / max(1, corpus.num_tokens)
        print(f"{learned:,} tokens are learned, {share:.1%}: those of answers")
    # Lengths that do not occur have no bar.
    for k, count in enumerate(counts):
        if count:
            bar = "#" * int(np.ceil(BAR * count / counts.max()))
            print(f"  {_span(k):>23}  {count:>13,}  {bar}")
    # A corpus of another program has no record.
    if record:
        made = [name for name, *_ in record.made_from.get("inputs", [])]
        shown = ", ".join(made[:SHOWN_FILES])
        if len(made) > SHOWN_FILES:
            shown += f" and {len(made) - SHOWN_FILES:,} other files"
        print(
            f"tokenizer {record.tokenizer or 'not recorded'}"
            + (f", from {shown}" if made else "")
            + (f", {record.skipped:,} bad lines left out" if record.skipped else "")
        )


def masks_of(corpus: IndexedDataset) -> LossMasks | None:
    """Return the loss masks of a corpus, if it has any. Raises DataError if they are not its own."""
    return LossMasks(corpus) if mask_path(corpus.prefix).exists() else None


def painted(
    ids: Sequence[int],
    mask: np.ndarray,
    tokenizer: Tokenizer | None,
    colors: tuple[str, str],
) -> str:
    """Return a conversation in which the tokens that are learned stand between two marks.

    tokenizer: decodes the tokens; None: their numbers are shown.  colors: the marks
    """
    start, stop = colors
    text = ""
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for first, last in zip(bounds, bounds[1:]):
        part = list(ids[first:last])
        words = tokenizer.decode(part) if tokenizer else " ".join(map(str, part))
        # Characters that would move the cursor are shown as escapes.
        words = "".join(
            c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in words
        )
        text += f"{start}{words}{stop}" if last > first and mask[first] else words
        text += "" if tokenizer else " "
    return text


def show(corpus: IndexedDataset, number: int, args: argparse.Namespace) -> None:
    """Print the tokens of one document, and their text if a tokenizer is given."""
    count = corpus.num_documents
    if not -count <= number < count:
        raise ConfigError(
            f"--document {number}: {corpus.prefix} has {count:,} documents, 0 to {count - 1}."
        )
    # A document of sentences has several sequences.
    number %= count
    first, last = corpus.document_indices[number : number + 2].tolist()
    left = args.tokens
    tokenizer = args.tokenizer_type and make_tokenizer(
        args.tokenizer_type, **{name: getattr(args, name) for name in TOKENIZER_FLAGS}
    )
    masks = masks_of(corpus)
    colors = COLORS if sys.stdout.isatty() else BRACKETS
    print(
        f"document {number}: {last - first} sequences, {int(corpus.lengths[first:last].sum())} tokens"
    )
    # Sequences are printed until there are as many tokens as asked for.
    for i in range(first, last):
        ids = corpus.get(i, 0, min(left, int(corpus.lengths[i]))).tolist()
        left -= len(ids)
        if masks:
            mask = masks.get(i, 0, len(ids))
            print(painted(ids, mask, tokenizer, colors))
        else:
            print(
                f"  [{' '.join(map(str, ids))}]"
                + (f" {tokenizer.decode(ids)!r}" if tokenizer else "")
            )
        if not left:
            break


def check(corpus: IndexedDataset, record: CorpusRecord | None) -> None:
    """Compare a corpus with its index and its checksums. Raises DataError."""
    corpus.check()
    corpus.check_tokens()
    masks = masks_of(corpus)
    if masks:
        masks.count()
    if record is None:
        print(
            "the index is whole. The tokens cannot be verified: there are no checksums (see "
            "--write-checksums)"
        )
        return
    if (record.documents, record.tokens) != (corpus.num_documents, corpus.num_tokens):
        raise DataError(
            f"{corpus.prefix} has {corpus.num_documents} documents and {corpus.num_tokens} "
            f"tokens, and its record is about {record.documents} and {record.tokens}: they do "
            "not belong together. Copy both again."
        )
    with ThreadPoolExecutor() as pool:
        check_sums(corpus.prefix, record, pool.map)
    print("the index is whole, and all checksums are right")


def write_checksums(corpus: IndexedDataset) -> CorpusRecord:
    """Write the checksums of a corpus that has none."""
    corpus.check()
    with ThreadPoolExecutor() as pool:
        record = record_of(corpus.prefix, pool.map)
    record.write(corpus.prefix)
    print(
        f"checksums of {len(record.pieces):,} pieces are in {record_path(corpus.prefix)}"
    )
    return record


def run(args: argparse.Namespace) -> None:
    """Do what the flags name for each corpus."""
    for prefix in args.prefix:
        corpus = IndexedDataset(prefix)
        record = read_record(prefix)
        if args.write_checksums and not record:
            record = write_checksums(corpus)
        describe(corpus, record)
        if args.document is not None:
            show(corpus, args.document, args)
        if args.check:
            check(corpus, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return main_guard(lambda: run(make_parser().parse_args(argv)))
