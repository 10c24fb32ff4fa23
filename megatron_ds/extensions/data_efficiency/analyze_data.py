"""Measure how difficult each training sample is, for a curriculum that starts with the easy ones.

    megatron-ds analyze --metrics vocab_rarity seqlen --output analysis --workers 2 \\
        --data-path corpus_text_document --seq-length 128 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer

Give it the flags of the training, and --model bert for a BERT (flags of the model's size and of the run are
ignored). The samples are those of one epoch of the training data. For each metric, the index files are
written to {output}/{metric}/; name them in the "curriculum_metrics" block of a DeepSpeed JSON. DeepSpeed can
read them too. Finished shards are not computed again, so repeat the same command after a failure.

On a cluster, run one task for each shard (--task map; the shard is chosen by --shard-index,
SLURM_ARRAY_TASK_ID or RANK), then one --task reduce. vocab_rarity needs total_vocab_freq, mapped and reduced
first; --task all includes it.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np

from megatron_ds.cli import Arguments, main_guard
from megatron_ds.config.parse import read
from megatron_ds.console import set_up_logging
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.loading.sources import read_sources
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.data_efficiency.difficulty_analysis import (
    identity,
    is_reduced,
    map_shard,
    percentiles,
    reduce_metric,
)
from megatron_ds.extensions.data_efficiency.difficulty_metrics import (
    FREQUENCY,
    METRICS,
    TOTALS,
    MetricSpec,
    parse_metric,
)
from megatron_ds.models import MODELS

logger = logging.getLogger(__name__)
SHARDS = 16


def make_parser() -> Arguments:
    """Return the flags of the tool itself; all others are those of the training."""
    # Flags of the training are read by `Corpus`, so they are not declared here.
    parser = Arguments(__doc__)
    add = parser.add_argument_group(
        "analysis; other flags are those of the training"
    ).add_argument
    add(
        "--metrics",
        nargs="+",
        required=True,
        metavar="METRIC",
        help=f"{', '.join({**METRICS, **TOTALS})}, or name=module:function for a function of your own, which "
        'gets the samples as arrays by name ({"tokens": [b, s + 1]}; of a BERT {"text": [b, s], '
        '"padding_mask": [b, s], …}) and returns b integers',
    )
    add("--output", required=True, metavar="DIR", help="folder for the results")
    # The work is cut into shards, which several commands or processes can share.
    add(
        "--task",
        choices=("all", "map", "reduce"),
        default="all",
        help="map computes the shards, reduce combines them (default: all, both)",
    )
    add(
        "--num-shards",
        type=int,
        default=SHARDS,
        metavar="N",
        help=f"number of shards; after a failure only unfinished ones are computed again (default {SHARDS})",
    )
    add(
        "--shard-index",
        type=int,
        metavar="I",
        help="with --task map, only this shard: 0 to N - 1",
    )
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that map shards (default 1)",
    )
    return parser


def parse_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """(the tool's own flags, the flags of the training)."""
    args, training = make_parser().parse_known_args(
        sys.argv[1:] if argv is None else list(argv)
    )
    for name in ("workers", "num_shards"):
        if getattr(args, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: use a positive number."
            )
    if args.task == "map" and args.shard_index is None:
        names = ("SLURM_ARRAY_TASK_ID", "RANK")
        found = next(
            (name for name in names if os.environ.get(name, "").isdigit()), None
        )
        args.shard_index = int(os.environ[found]) if found else None
    if args.shard_index is not None and not 0 <= args.shard_index < args.num_shards:
        raise ConfigError(
            f"--shard-index {args.shard_index}: with --num-shards {args.num_shards}, shards "
            f"are 0 to {args.num_shards - 1}."
        )
    if args.shard_index is not None and args.task != "map":
        raise ConfigError(
            f"--shard-index {args.shard_index} with --task {args.task}: only --task map "
            "computes one shard. Use --task map."
        )
    return args, training


class Corpus:
    """One epoch of the training data of these flags, and all that its samples depend on."""

    def __init__(self, training: Sequence[str]):
        config = read(training)
        sources = read_sources(config.data)
        if config.data.mock_data or not (sources.whole or sources.parts[0]).values:
            raise ConfigError(
                "missing: the data to analyse. Give the --data-path, or --train-data-path, of "
                "the training."
            )
        if config.model.seq_length is None:
            raise ConfigError(
                "missing: --seq-length. Give that of the training: the corpus is cut into "
                "samples of it."
            )
        tokenizer = build_tokenizer(config.data, config.model)
        kind = MODELS[config.model.model].data
        dataset = build_datasets(
            config, (1, 0, 0), tokenizer, kind, one_epoch=True
        ).train
        assert dataset is not None, "a training sample is wanted"
        self.dataset = dataset
        self.identity = identity(config, kind, len(self.dataset))
        self.vocab_size = tokenizer.vocab_size
        self.seq_length = config.model.seq_length


def run(args: argparse.Namespace, training: Sequence[str]) -> None:
    """Analyze the corpus that the flags of the training name."""
    # Metrics that are named twice are computed once.
    corpus = Corpus(training)
    output = Path(args.output)
    specs = [
        parse_metric(text, corpus.vocab_size, corpus.seq_length)
        for text in dict.fromkeys(args.metrics)
    ]
    logger.info(
        "%s samples of sequence length %d in %d shards",
        f"{len(corpus.dataset):,}",
        corpus.seq_length,
        args.num_shards,
    )
    # Rarity reads the frequencies of tokens, so these are complete before it begins.
    frequency = MetricSpec(
        FREQUENCY, vocab_size=corpus.vocab_size, seq_length=corpus.seq_length
    )
    if any(spec.needs_frequency for spec in specs):
        specs = [spec for spec in specs if spec != frequency]
        if args.task == "all":
            analyse([frequency], args, training, corpus, output)
        elif not is_reduced(output, frequency, corpus.identity):
            raise DataError(
                f"{output / FREQUENCY} is not complete, or was made from other data, and "
                f"vocab_rarity is computed from it. Run --metrics {FREQUENCY} with --task map, "
                "then with --task reduce, then this command again."
            )
    # The metrics that were asked for.
    analyse(specs, args, training, corpus, output)


def analyse(
    specs: Sequence[MetricSpec],
    args: argparse.Namespace,
    training: Sequence[str],
    corpus: Corpus,
    output: Path,
) -> None:
    """Map and reduce each metric, or do the half that --task names."""
    todo = [spec for spec in specs if not is_reduced(output, spec, corpus.identity)]
    for spec in specs:
        if spec not in todo:
            logger.info("%s: complete already", spec.name)
    if todo and args.task != "reduce":
        map_shards(todo, args, training, corpus, output)
    if args.task != "map":
        for spec in todo:
            values = reduce_metric(output, spec, args.num_shards, corpus.identity)
            occurring = f"{np.count_nonzero(values):,} of {len(values):,} ids occur"
            logger.info(
                "%s: %s", spec.name, occurring if spec.is_total else percentiles(values)
            )


def map_shards(
    specs: Sequence[MetricSpec],
    args: argparse.Namespace,
    training: Sequence[str],
    corpus: Corpus,
    output: Path,
) -> None:
    """Measure the samples of each shard that has no files yet."""
    shards = range(args.num_shards) if args.shard_index is None else [args.shard_index]
    started = time.monotonic()
    work = partial(
        map_shard,
        save=output,
        num_shards=args.num_shards,
        specs=specs,
        dataset_id=corpus.identity,
    )
    for done, (shard, names) in enumerate(
        _mapped(work, shards, min(args.workers, len(shards)), training, corpus), 1
    ):
        seconds = time.monotonic() - started
        logger.info(
            "shard %d: %s (%d of %d shards, %.0f s, about %.0f s left)",
            shard,
            ", ".join(names) or "complete already",
            done,
            len(shards),
            seconds,
            seconds / done * (len(shards) - done),
        )


def _mapped(
    work: partial,
    shards: Sequence[int],
    workers: int,
    training: Sequence[str],
    corpus: Corpus,
):
    if workers <= 1:
        yield from ((shard, work(corpus.dataset, shard=shard)) for shard in shards)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (list(training),)
    )
    try:
        yield from zip(shards, pool.map(partial(_map_here, work), shards))
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps because memory ran out. Finished shards are "
            "kept. Use fewer --workers."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_corpus: Corpus | None = None  # of a worker process, opened when the worker starts


def _start_worker(training: list[str]) -> None:
    global _corpus
    _corpus = Corpus(training)


def _map_here(work: partial, shard: int) -> list[str]:
    assert _corpus is not None, "a worker opens it when it starts"
    return work(_corpus.dataset, shard=shard)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    set_up_logging(logging.INFO, stream=sys.stderr, replaces=False)
    return main_guard(lambda: run(*parse_arguments(argv)))
