"""Merge several corpora into one: all documents, in order.

    megatron-ds merge --input shards/ --output-prefix corpus_text_document
    megatron-ds merge --input corpus_00000_of_00002_text_document \\
        corpus_00001_of_00002_text_document --output-prefix corpus_text_document

Of a folder, all .bin/.idx pairs are merged, ordered by name. A missing shard is an error.
"""

import argparse
import logging
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.console import set_up_logging
from megatron_ds.data.text.indexed import IndexedDataset, corpus_paths
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.corpora.corpus_shards import merge

logger = logging.getLogger(__name__)
SHARD = re.compile(r"(.*)_(\d{5})_of_(\d{5})(_.*)")


def make_parser() -> Arguments:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="prefixes of .bin/.idx pairs, in order, or folders of them",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="the merged pair is PREFIX.bin and PREFIX.idx",
    )
    add(
        "--workers",
        type=int,
        default=4,
        metavar="N",
        help="number of threads that copy (default 4); more are faster with several disks",
    )
    return parser


def prefixes_of(inputs: Sequence[str], output: str) -> list[str]:
    """Return the prefixes, each folder replaced by those in it, ordered by name; without the output itself."""
    found = []
    for path in inputs:
        if not Path(path).is_dir():
            found.append(str(corpus_paths(path)[0])[:-4])
            continue
        pairs = sorted(
            str(p)[:-4]
            for p in Path(path).glob("*.idx")
            if corpus_paths(output)[1].resolve() != p.resolve()
        )
        if not pairs:
            raise DataError(f"--input {path}: there is no .idx file in this folder.")
        found += pairs
    return found


def check_shards(prefixes: Sequence[str]) -> None:
    """Raises DataError if shards of a set are missing."""
    there = defaultdict(set)
    for prefix in prefixes:
        if match := SHARD.fullmatch(prefix):
            name, index, count, key = match.groups()
            there[name, int(count), key].add(int(index))
    for (name, count, key), found in there.items():
        if missing := sorted(set(range(count)) - found):
            more = " …" if len(missing) > 10 else ""
            raise DataError(
                f"of {count} shards {name}_…{key} {len(missing)} are missing: "
                f"{', '.join(map(str, missing[:10]))}{more}. Make them with "
                f"megatron-ds preprocess --num-shards {count} --shard-index I before merging."
            )


def run(args: argparse.Namespace) -> None:
    """Merge the corpora, and log the size of the result."""
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers}: use a positive number.")
    prefixes = prefixes_of(args.input, args.output_prefix)
    started = time.monotonic()
    check_shards(prefixes)
    output = str(corpus_paths(args.output_prefix)[0])[:-4]
    record = merge(prefixes, output, workers=args.workers)
    if record is None:
        logger.info(
            "%s has no checksums, since some of its parts have none. To add them: "
            "megatron-ds inspect %s --write-checksums",
            output,
            output,
        )
    corpus = IndexedDataset(output)
    logger.info(
        "%s documents, %s tokens of %d corpora in %.1f s: %s",
        f"{corpus.num_documents:,}",
        f"{corpus.num_tokens:,}",
        len(prefixes),
        time.monotonic() - started,
        output,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    set_up_logging(logging.INFO, stream=sys.stderr, replaces=False)
    return main_guard(lambda: run(make_parser().parse_args(argv)))
