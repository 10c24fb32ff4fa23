"""Turn text into the tokens that training reads.

    megatron-ds preprocess --input books/ --output-prefix books --append-eod --workers 2 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/
    megatron-ds preprocess --input corpus.jsonl more.parquet --output-prefix corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/
    megatron-ds preprocess --input chats.jsonl --output-prefix chats --chat \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/

Input: plain text (.txt, .md); one JSON object per line (.jsonl and other names, or - for standard input);
either of them compressed (.gz, .bz2, .xz, .zst); tables (.parquet, .h5); or folders of such files. Inputs are
read in order.
Output: {prefix}_{key}_document.bin and .idx for each key, and a .json with checksums. Pass that name without
its ending to training as --data-path. An error leaves no output behind.

On many machines, each machine makes one shard, chosen by --num-shards and by --shard-index,
SLURM_ARRAY_TASK_ID or RANK. A finished shard is not made again. megatron-ds merge merges the shards
into one corpus.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.console import set_up_logging
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.chat.template import ChatTemplate, load_template
from megatron_ds.extensions.corpora.corpus_shards import (
    preprocess_in_shards,
    run_here,
    run_on_ray,
)
from megatron_ds.extensions.corpora.plain_text import TextCut
from megatron_ds.extensions.corpora.preprocess import (
    PreprocessOptions,
    Shard,
    Written,
    output_prefix,
    preprocess,
    shard_prefix,
)
from megatron_ds.extensions.corpora.preprocess_flags import GROUPS
from megatron_ds.extensions.corpora.sentences import Splitter, learn_splitter
from megatron_ds.extensions.corpora.text_files import (
    STDIN,
    TABLES,
    check_files,
    files_of,
    is_plain_text,
    read_blocks,
    size_of,
    texts_of,
)

logger = logging.getLogger(__name__)
# Records of messages → the key that names their output, as a key of JSON lines does.
CHAT_KEYS = {"chat": "chat", "preference": "preference"}
CHAT_TOKENIZERS = ("HuggingFaceTokenizer", "HFTokenizer")
TOKENIZER_FLAGS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")


def make_parser() -> Arguments:
    """Return the flags of the command."""
    parser = Arguments(__doc__)
    for title, options in GROUPS.items():
        parser.add_table(options, title)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked together. Raises ConfigError."""
    args = make_parser().parse_args(argv)
    # Flags are checked before any file is opened.
    for name in ("workers", "log_interval", "partitions", "num_shards"):
        if (getattr(args, name) or 1) < 1 or getattr(args, name) == 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: use a positive number."
            )
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError(
            f"--json-keys {' '.join(args.json_keys)}: a key is named twice, and each makes one "
            "output. Name each key once."
        )
    check_chat(args)
    # Some pairs of flags contradict each other.
    if args.text_separator is not None and args.text_documents != "file":
        raise ConfigError(
            f"--text-separator {args.text_separator!r} and --text-documents "
            f"{args.text_documents} both set where documents end; give only one."
        )
    if args.partitions > 1 and args.workers % args.partitions:
        raise ConfigError(
            f"--workers {args.workers} is not a multiple of --partitions {args.partitions}, "
            "and all partitions have equally many: use --workers "
            f"{args.partitions * -(-args.workers // args.partitions)}."
        )
    if args.partitions > 1 and args.num_shards:
        raise ConfigError(
            "--partitions divides the work of this machine, --num-shards that of many "
            "machines: give only one of them."
        )
    # A number of shards is needed to make one of them.
    if args.shard_index is not None and (args.num_shards is None or args.ray):
        raise ConfigError(
            "--shard-index chooses one of --num-shards"
            + (
                ", and --ray makes all of them: remove it."
                if args.ray
                else ": give --num-shards too."
            )
        )
    if args.ray and not args.num_shards:
        raise ConfigError(
            "--ray needs --num-shards: give a few times the number of the cluster's cores."
        )
    return args


def check_chat(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not go together with --chat or --preference. Sets the key that names the
    output."""
    given = [name for name in CHAT_KEYS if getattr(args, name)]
    if len(given) > 1:
        raise ConfigError(
            "--chat and --preference read records of different formats. Give one of them."
        )
    if not given:
        alone = ("chat_template", "chat_template_kwargs")
        given = [name for name in alone if getattr(args, name) is not None]
        if given:
            flag = given[0].replace("_", "-")
            raise ConfigError(
                f"--{flag} is about conversations, and without --chat or --preference records are texts: add one of "
                "them."
            )
        return
    if args.split_sentences or args.json_keys != ["text"]:
        raise ConfigError(
            f"--{given[0]} reads whole records: --split-sentences and --json-keys are about texts. Remove them."
        )
    if args.tokenizer_type not in CHAT_TOKENIZERS:
        raise ConfigError(
            f"--{given[0]} with --tokenizer-type {args.tokenizer_type}: only {CHAT_TOKENIZERS[0]} has chat "
            "templates, special tokens and the place of each token in the text. Use it."
        )
    args.json_keys = [CHAT_KEYS[given[0]]]


def chat_template_of(args: argparse.Namespace) -> ChatTemplate | None:
    """Return the template of conversations. Raises ConfigError, and DataError if there is none."""
    kind = next((name for name in CHAT_KEYS if getattr(args, name)), None)
    if kind is None:
        return None
    # Conversations are JSON lines, or rows with columns of the same names.
    for path in args.input:
        is_table = path.endswith(TABLES) and not path.endswith(".parquet")
        if is_plain_text(path) or is_table:
            raise ConfigError(
                f"--{kind} reads JSON lines and Parquet, and {path} is a file of another kind. Convert it: one JSON "
                "object with the conversation in each line."
            )
    values: dict | None = {}
    if args.chat_template_kwargs:
        try:
            values = json.loads(args.chat_template_kwargs)
        except ValueError:
            values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--chat-template-kwargs {args.chat_template_kwargs!r} is not a JSON object. Write for "
            """instance '{"enable_thinking": false}'."""
        )
    if not args.tokenizer_model:
        raise ConfigError(
            f"--{kind} needs --tokenizer-model, the tokenizer of the model."
        )
    return load_template(args.tokenizer_model, args.chat_template, values)


def shard_of(args: argparse.Namespace, env: Mapping[str, str]) -> Shard | None:
    """(index, number of shards) of the shard this command makes; None for the whole input."""
    if args.num_shards is None or args.ray:
        return None
    index = args.shard_index
    if index is None and "SLURM_ARRAY_TASK_ID" in env:
        first = _number(env, "SLURM_ARRAY_TASK_MIN")
        index = _number(env, "SLURM_ARRAY_TASK_ID") - first
    elif index is None and "RANK" in env:
        index = _number(env, "RANK")
    if index is None:
        raise ConfigError(
            f"--num-shards {args.num_shards} does not choose the shard to make. Give "
            "--shard-index, or run in a Slurm array or with RANK in the environment."
        )
    if not 0 <= index < args.num_shards:
        raise ConfigError(
            f"shard {index} of {args.num_shards} does not exist: shards are numbered 0 to "
            f"{args.num_shards - 1}."
        )
    return index, args.num_shards


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, 0 without it. Raises ConfigError."""
    text = env.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(
            f"the environment has {name}={text}, which is no number of a shard. Give --shard-index."
        )
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Write the corpus, or one shard of it, and log what was written."""
    # All files are checked before the first is read.
    args.input = files_of(args.input)
    check_files(args.input, args.json_keys)
    shard = shard_of(args, os.environ)
    started = time.monotonic()
    # Worker processes make their own tokenizer, so they get the recipe for one.
    make = partial(
        make_tokenizer,
        args.tokenizer_type,
        backend=args.tokenizer_backend,
        **{name: getattr(args, name) for name in TOKENIZER_FLAGS},
    )
    options = PreprocessOptions(
        args.json_keys,
        args.append_eod,
        args.skip_bad_lines,
        splitter(args),
        cut_of(args),
        chat_template_of(args),
        args.preference,
    )
    task = partial(preprocess, args.input, args.output_prefix, make, options)
    # A bar needs a terminal; a log file gets lines.
    if args.partitions > 1 or args.ray:
        written = run_in_shards(args, make, task)
    else:
        show, close = (
            progress_bar(args)
            if sys.stderr.isatty()
            else (progress_lines(args), lambda: None)
        )
        try:
            written = task(workers=args.workers, shard=shard, progress=show)
        finally:
            close()
    report(args, written, shard, time.monotonic() - started)


def run_in_shards(args: argparse.Namespace, make: Callable, task: partial) -> Written:
    """Make all shards in processes of this machine or on Ray, and merge them."""
    make()  # raises here, once, if the tokenizer flags are wrong
    each = args.workers // args.partitions
    address = None if args.ray == "local" else args.ray
    run = partial(run_on_ray, address=address, cores=each) if args.ray else run_here
    return preprocess_in_shards(
        partial(task, workers=each),
        args.num_shards or args.partitions,
        args.output_prefix,
        args.json_keys,
        run=run,
        sentences=args.split_sentences,
        workers=args.workers,
        done=lambda w: logger.info(
            "a shard %s: %s documents, %s tokens",
            "was done before" if w.done_before else "is done",
            f"{w.documents:,}",
            f"{w.tokens:,}",
        ),
    )


def cut_of(args: argparse.Namespace) -> TextCut:
    """Return how plain text is cut into documents."""
    return TextCut(args.text_documents, args.text_separator)


def splitter(args: argparse.Namespace) -> Splitter | None:
    """Learned from the start of the whole input, so that all shards have the same splitter."""
    if not args.split_sentences:
        if args.keep_newlines or args.lang:
            raise ConfigError(
                "--keep-newlines and --lang only apply with --split-sentences: add it."
            )
        return None
    if STDIN in args.input:
        raise ConfigError(
            "--split-sentences reads the start of the input twice, which standard input does "
            "not allow: write it to a file first."
        )
    return learn_splitter(_texts(args), args.lang or "english", args.keep_newlines)


def _texts(args: argparse.Namespace) -> Iterator[str]:
    """Yield the texts of the whole input, file by file and block by block."""
    for path in args.input:
        for block in read_blocks(path, keys=args.json_keys, cut=cut_of(args)):
            for column in texts_of(block, args.json_keys, True)[0]:
                yield from (text for text in column if isinstance(text, str))


def report(
    args: argparse.Namespace, written: Written, shard: Shard | None, seconds: float
) -> None:
    """Log what was written."""
    prefix = shard_prefix(args.output_prefix, shard) if shard else args.output_prefix
    outputs = ", ".join(
        output_prefix(prefix, key, args.split_sentences) for key in args.json_keys
    )
    # An earlier command has finished the shard.
    if written.done_before:
        logger.info(
            "%s documents, %s tokens, done before: %s",
            f"{written.documents:,}",
            f"{written.tokens:,}",
            outputs,
        )
        return
    # Only the first bad lines are listed.
    for line in written.bad:
        logger.warning("skipped %s", line)
    if written.num_bad:
        logger.warning("skipped %d bad lines in all", written.num_bad)
    # Some conversations were written, but probably not as they were meant.
    for reason, doubt in written.doubts.items():
        logger.warning(
            "in %s conversations %s. %s", f"{doubt.number:,}", reason, doubt.sample
        )
    texts = [path for path in args.input if is_plain_text(path)]
    if texts and cut_of(args).is_whole:
        logger.info(
            "%d files of plain text, such as %s, became one document each: --text-documents line, or paragraph, makes "
            "a document of each line, or of each paragraph",
            len(texts),
            texts[0],
        )
    # The rate counts the part of the input that a shard reads.
    size = sum(map(size_of, args.input)) / (shard[1] if shard else 1)
    rate = f" ({size / 1e6 / max(seconds, 1e-9):.1f} MB/s)" if size else ""
    logger.info(
        "%s documents, %s tokens in %.1f s%s: %s",
        f"{written.documents:,}",
        f"{written.tokens:,}",
        seconds,
        rate,
        outputs,
    )


def bytes_done(paths: Sequence[str]) -> tuple[int, Callable[[str, int], int]]:
    """Bytes of all inputs, and a function from (file, position in it) to the bytes read so far."""
    ends = list(accumulate(map(size_of, paths), initial=0))
    before = dict(zip(paths, ends))
    return ends[-1], lambda path, position: before[path] + position


def progress_bar(args: argparse.Namespace):
    """(function that shows the progress, function that ends the bar), for a terminal."""
    from tqdm import tqdm

    total, done = bytes_done(args.input)
    bar = tqdm(total=total or None, unit="B", unit_scale=True, unit_divisor=1000)

    def show(path: str, position: int, written: Written) -> None:
        bar.set_postfix_str(f"{written.documents:,} documents", refresh=False)
        bar.update(done(path, position) - bar.n)

    return show, bar.close


def progress_lines(args: argparse.Namespace):
    """Return a function that logs the progress every --log-interval documents."""
    total, done = bytes_done(args.input)
    shown = 0

    def show(path: str, position: int, written: Written) -> None:
        nonlocal shown
        if written.documents - shown >= args.log_interval:
            shown = written.documents
            logger.info(
                "%s documents, %.1f of %.1f MB read",
                f"{shown:,}",
                done(path, position) / 1e6,
                total / 1e6,
            )

    return show


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    set_up_logging(logging.INFO, stream=sys.stderr, replaces=False)
    return main_guard(lambda: run(parse_arguments(argv)))
