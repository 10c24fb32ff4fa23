"""Train a tokenizer on your own text: byte-level BPE, as of GPT-2, or BERT's WordPiece.

    megatron-ds tokenizer --input books/ --vocab-size 2048 --output tokenizer/
    megatron-ds tokenizer --input corpus.jsonl --vocab-size 2048 --output tokenizer/ \\
        --kind wordpiece

Writes tokenizer.json (--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/) and the same
vocabulary for BPE as vocab.json and merges.txt (--tokenizer-type GPT2BPETokenizer --vocab-file … --merge-file
…), where <|endoftext|> has id 0 and ends a document; for WordPiece as vocab.txt, which begins with [PAD]
[UNK] [CLS] [SEP] [MASK].
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.console import set_up_logging
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora.text_files import (
    INPUT_HELP,
    check_files,
    files_of,
    read_blocks,
    texts_of,
)
from megatron_ds.extensions.corpora.vocabulary_training import (
    train_byte_level_bpe,
    train_word_pieces,
)

logger = logging.getLogger(__name__)
KINDS: dict[str, Callable[..., int]] = {
    "bpe": train_byte_level_bpe,
    "wordpiece": train_word_pieces,
    "wordpiece-cased": partial(train_word_pieces, lower=False),
}


def make_parser() -> Arguments:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # The text to learn from, the vocabulary, and where it goes.
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=INPUT_HELP + ". About 100 MB of text are enough",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of JSON lines, or columns of tables, whose text to learn from (default: text)",
    )
    add(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="number of entries, including bytes and special tokens; 2048 for a toy model, 32000 to 128000 "
        "for real ones",
    )
    add(
        "--kind",
        choices=KINDS,
        default="bpe",
        help="bpe for a GPT; wordpiece (which lower-cases all text) or wordpiece-cased for a BERT (default: "
        "bpe)",
    )
    add(
        "--min-frequency",
        type=int,
        default=2,
        metavar="N",
        help="merge a pair only if it occurs at least this often (default 2)",
    )
    add(
        "--output",
        required=True,
        metavar="FOLDER",
        help="folder for tokenizer.json and the vocabulary's own files",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked together. Raises ConfigError."""
    return make_parser().parse_args(argv)


def read_texts(paths: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all inputs, in order."""
    for path in paths:
        for block in read_blocks(path, keys=keys):
            columns, bad = texts_of(block, keys)
            if bad:
                raise DataError(f"{bad[0]}. Nothing was written.")
            for column in columns:
                yield from cast("list[str]", column)  # not split into sentences


def run(args: argparse.Namespace) -> None:
    """Train the tokenizer and write its files."""
    paths = files_of(args.input)
    check_files(paths, args.json_keys)
    size = KINDS[args.kind](
        read_texts(paths, args.json_keys),
        args.vocab_size,
        args.output,
        min_frequency=args.min_frequency,
    )
    logger.info("wrote a vocabulary of %d entries to %s", size, args.output)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    set_up_logging(logging.INFO, stream=sys.stderr, replaces=False)
    return main_guard(lambda: run(parse_arguments(argv)))
