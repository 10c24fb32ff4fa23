"""Turn text into the tokens that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod --workers 2 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/

Input: one JSON object a line, plain or .gz, several files in order. Output: {prefix}_{key}_document.bin and .idx for each
JSON key; pass that name without ending to training as --data-path. An error leaves no output behind.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron_ds.config.arguments import Arguments
from megatron_ds.config.guard import main_guard
from megatron_ds.data.json_lines import check_files
from megatron_ds.data.preprocess import Written, output_prefix, preprocess
from megatron_ds.data.tokenizers import TOKENIZERS, make_tokenizer
from megatron_ds.errors import ConfigError

logger = logging.getLogger(__name__)
TOKENIZER_FLAGS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")


def make_parser() -> Arguments:
    parser = Arguments(__doc__)
    add = parser.add_argument_group("text").add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON lines, plain or .gz")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys whose text to tokenize (default: text)")
    add("--skip-bad-lines", action="store_true",
        help="leave out lines that are no JSON, no UTF-8, or lack a key, and say how many; without it the first one is an "
             "error. Not for a corpus you have not looked at: a wrong key leaves out everything")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", required=True, help=f"one of {', '.join(TOKENIZERS)}")
    add("--tokenizer-model", metavar="PATH", help="tokenizer.json, its folder, or a sentencepiece .model")
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    add("--vocab-size", type=int, metavar="N", help="number of ids, for NullTokenizer only")
    add("--append-eod", action="store_true",
        help="end each document with the end-of-document token; almost always wanted: without it a model cannot tell where "
             "one document ends and the next begins")
    add = parser.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="files are named {prefix}_{key}_document.bin and .idx")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default 1); the output is the same")
    add("--log-interval", type=int, default=1000, metavar="N",
        help="where there is no terminal for a progress bar: documents between two lines of log (default 1000)")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    for name in ("workers", "log_interval"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: use a positive number.")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError(f"--json-keys {' '.join(args.json_keys)}: a key is named twice, and each makes one output.")
    return args


def run(args: argparse.Namespace) -> None:
    check_files(args.input)
    make = partial(make_tokenizer, args.tokenizer_type, **{name: getattr(args, name) for name in TOKENIZER_FLAGS})
    show, close = progress_bar(args) if sys.stderr.isatty() else (progress_lines(args), lambda: None)
    started = time.monotonic()
    try:
        written = preprocess(args.input, args.output_prefix, make, json_keys=args.json_keys, append_eod=args.append_eod,
                             workers=args.workers, skip_bad_lines=args.skip_bad_lines, progress=show)
    finally:
        close()
    report(args, written, time.monotonic() - started)


def report(args: argparse.Namespace, written: Written, seconds: float) -> None:
    for line in written.bad[:10]:
        logger.warning("skipped %s", line)
    if written.bad:
        logger.warning("skipped %d bad lines in all", len(written.bad))
    size = sum(map(os.path.getsize, args.input))
    logger.info("%s documents, %s tokens in %.1f s (%.1f MB/s): %s", f"{written.documents:,}", f"{written.tokens:,}", seconds,
                size / 1e6 / max(seconds, 1e-9), ", ".join(output_prefix(args.output_prefix, k) for k in args.json_keys))


def bytes_done(paths: Sequence[str]) -> tuple[int, Callable[[str, int], int]]:
    """Bytes of all inputs, and a function from (file, position in it) to the bytes read so far."""
    sizes = [os.path.getsize(p) for p in paths]
    before = {path: sum(sizes[:i]) for i, path in enumerate(paths)}
    return sum(sizes), lambda path, position: before[path] + position


def progress_bar(args: argparse.Namespace):
    from tqdm import tqdm
    total, done = bytes_done(args.input)
    bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1000)

    def show(path: str, position: int, written: Written) -> None:
        bar.set_postfix_str(f"{written.documents:,} documents", refresh=False)
        bar.update(done(path, position) - bar.n)

    return show, bar.close


def progress_lines(args: argparse.Namespace):
    total, done = bytes_done(args.input)
    told = 0

    def show(path: str, position: int, written: Written) -> None:
        nonlocal told
        if written.documents - told >= args.log_interval:
            told = written.documents
            logger.info("%s documents, %.1f of %.1f MB read", f"{told:,}", done(path, position) / 1e6, total / 1e6)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return main_guard(lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
