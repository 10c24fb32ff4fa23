"""Shards of a corpus: made at the same time, here or on a Ray cluster, and merged into one corpus.

Each shard is an independent task. A complete shard is not made again, so a command that was killed continues
where it was. Merging copies the shards in parallel, since each one's place is known from the sizes:

    a.bin |--- a ---|        merged.bin |--- a ---|- b -|------ c ------|
    b.bin |- b -|            merged.idx   lengths of a, b and c; new byte offsets;
    c.bin |------ c ------|               document numbers of b continue those of a

The merged corpus is complete or absent: it is written under another name and renamed, `.idx` last.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from ...data.text.indexed import CODES, IndexedDataset, corpus_paths, write_index
from ...data.text.mask_file import LossMasks, mask_path
from ...errors import ConfigError, DataError
from ...host.packages import import_extra
from ...host.regular_file import create_again
from ..chat.loss_masks import add_doubts
from .corpus_record import (
    CorpusRecord,
    read_record,
    record_path,
    remove_record,
    sha256_of,
)
from .preprocess import Shard, Written, end_with_parent, output_prefix, shard_prefix

COPY_BYTES = 1 << 26  # copied by one task
Task = Callable[..., Written]  # task(shard=(i, n)); is pickled
# Runs the task for each of n shards, in any order.
Run = Callable[[Task, int], Iterator[Written]]


def run_here(task: Task, count: int) -> Iterator[Written]:
    """Run all shards at once, each in a process of its own."""
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), end_with_parent, (os.getpid(),)
    )
    try:
        for future in as_completed(
            [pool.submit(task, shard=(i, count)) for i in range(count)]
        ):
            yield future.result()
    except BrokenProcessPool:
        raise DataError(
            "a process was killed, perhaps because memory ran out. Finished shards are kept: the "
            "same command continues from there. Use fewer --partitions."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def run_on_ray(
    task: Task, count: int, address: str | None = None, cores: int = 1
) -> Iterator[Written]:
    """Run each shard as a Ray task of so many cores. Files must have the same names on all machines."""
    ray = import_extra("--ray", "ray", "ray")
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError) as e:
        raise ConfigError(
            f"--ray {address}: {e}. Give the address of a running cluster, or local."
        ) from None
    remote = ray.remote(num_cpus=cores, max_retries=3)(_returning_errors)
    waiting = [remote.remote(task, (i, count)) for i in range(count)]
    while waiting:
        ready, waiting = ray.wait(waiting)
        for written in ray.get(ready):
            if isinstance(written, str):
                raise DataError(written)
            yield written


def _returning_errors(task: Task, shard: Shard) -> Written | str:
    """Return the message of a DataError: bad input fails again, so Ray must not retry the task."""
    try:
        return task(shard=shard)
    except DataError as error:
        return str(error)


def preprocess_in_shards(
    task: Task,
    count: int,
    prefix: str,
    keys: Sequence[str],
    *,
    run: Run = run_here,
    sentences: bool = False,
    workers: int = 1,
    done: Callable[[Written], None] = lambda written: None,
) -> Written:
    """Make all shards, merge them into `{prefix}_{key}_document` for each key, and remove them.

    done: called with the counts of each finished shard.  Raises DataError for the first shard that fails;
    finished ones are kept.
    """
    # Each shard is reported as soon as it is done.
    total = Written()
    for written in run(task, count):
        done(written)
        total.documents += written.documents
        total.tokens += written.tokens
        total.num_bad += written.num_bad
        add_doubts(total.doubts, written.doubts)
        total.bad += written.bad[: 10 - len(total.bad)]
    # The order of the shards is that of the input.
    prefixes = [shard_prefix(prefix, (i, count)) for i in range(count)]
    shards = {
        key: [output_prefix(shard, key, sentences) for shard in prefixes]
        for key in keys
    }
    if total.documents:
        for key, names in shards.items():
            merge(names, output_prefix(prefix, key, sentences), workers=workers)
    # The record goes first: a shard without one counts as not complete.
    for name in (name for names in shards.values() for name in names):
        paths = (record_path(name), *reversed(corpus_paths(name)), mask_path(name))
        for path in paths:
            path.unlink(missing_ok=True)
    if not total.documents:
        only_bad = ", only bad lines" if total.num_bad else ""
        raise DataError(f"the input has no documents{only_bad}. Nothing was written.")
    return total


def merge(
    prefixes: Sequence[str], output: str, *, workers: int = 4
) -> CorpusRecord | None:
    """Write `output.bin/.idx` with the documents of all corpora in order, and a record if each corpus has one.

    workers: threads that copy.  Raises DataError for a damaged corpus, for corpora of different token types
    or tokenizers, and when the disk is full; then nothing is written.
    """
    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    records = [read_record(prefix) for prefix in prefixes]
    _check(prefixes, corpora, records, output)
    bin_path, idx_path = corpus_paths(output)
    partial = [Path(f"{path}.partial") for path in (bin_path, idx_path)]
    masks = _masks_of(corpora, records)
    if masks:
        partial.append(Path(f"{mask_path(output)}.partial"))
    # The files are written beside the old ones and renamed when both are complete.
    try:
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        _join([corpus.bin_path for corpus in corpora], partial[0], workers)
        if masks:
            _join(masks, partial[2], workers)
        _write_index(corpora, partial[1])
        # Both files are complete: they replace the old ones. An old index must never be next to new tokens.
        remove_record(output)
        idx_path.unlink(missing_ok=True)
        mask_path(output).unlink(missing_ok=True)
        if masks:
            partial[2].replace(mask_path(output))
        partial[0].replace(bin_path)
        partial[1].replace(idx_path)
    except OSError as e:
        raise DataError(
            f"cannot write {output}: {e.strerror or e}. Nothing was kept; free some space, or "
            "choose another --output-prefix."
        ) from None
    finally:
        for path in partial:
            with contextlib.suppress(OSError):
                path.unlink()
    known = [record for record in records if record is not None]
    if len(known) < len(records):
        return None
    # The record describes the merged files by the pieces of all records.
    record = CorpusRecord(
        sum(corpus.num_documents for corpus in corpora),
        sum(corpus.num_tokens for corpus in corpora),
        known[0].tokenizer,
        [piece for record in known for piece in record.pieces],
        sha256_of(idx_path),
        sum(record.skipped for record in known),
        mask_sha256=sha256_of(mask_path(output)) if masks else None,
    )
    record.write(output)
    return record


def _write_index(corpora: Sequence[IndexedDataset], path: Path) -> None:
    """Write the .idx file of the merged corpus, and wait until it is on the disk."""
    dtype = corpora[0].dtype.newbyteorder("=")
    parts = [(corpus.lengths, corpus.document_indices) for corpus in corpora]
    with create_again(path) as f:
        write_index(f, CODES[dtype], dtype.itemsize, parts)
        f.flush()
        os.fsync(f.fileno())


def _check(
    prefixes: Sequence[str],
    corpora: Sequence[IndexedDataset],
    records: Sequence[CorpusRecord | None],
    output: str,
) -> None:
    if not corpora:
        raise DataError("no corpora to merge.")
    if corpus_paths(output)[0].resolve() in (
        corpus_paths(prefix)[0].resolve() for prefix in prefixes
    ):
        raise DataError(
            f"--output-prefix {output} is one of the corpora to merge. Choose another name."
        )
    # Bytes of different types cannot be joined, and a damaged corpus would make all of them unusable.
    for prefix, corpus in zip(prefixes, corpora):
        if corpus.dtype != corpora[0].dtype:
            raise DataError(
                f"{prefix} has tokens of type {corpus.dtype} and {prefixes[0]} of "
                f"{corpora[0].dtype}: they were made with vocabularies of different sizes. Make "
                "one of them again."
            )
        corpus.check()
    # Only corpora with a record name their tokenizer.
    known = [
        (prefix, record)
        for prefix, record in zip(prefixes, records)
        if record and record.tokenizer
    ]
    for prefix, record in known:
        if record.tokenizer != known[0][1].tokenizer:
            raise DataError(
                f"{prefix} was made with the tokenizer {record.tokenizer} and {known[0][0]} with "
                f"{known[0][1].tokenizer}: the same id means different text in them. Make one of "
                "them again."
            )


def _masks_of(
    corpora: Sequence[IndexedDataset], records: Sequence[CorpusRecord | None]
) -> list[Path]:
    """Return the loss masks of all corpora, or none. Raises DataError if only some have masks, or some are
    missing.
    """
    there = [mask_path(corpus.prefix) for corpus in corpora]
    missing = [path for path in there if not path.is_file()]
    is_recorded = any(record and record.mask_sha256 for record in records)
    if len(missing) == len(there) and not is_recorded:
        return []
    if missing:
        raise DataError(
            f"{missing[0]} does not exist, and the records or other corpora have loss masks. Copy it again; "
            "conversations and texts cannot be merged into one corpus."
        )
    return [LossMasks(corpus).path for corpus in corpora]


def _join(paths: Sequence[Path], path: Path, workers: int) -> None:
    """Write the bytes of files one after the other.  workers: threads that copy."""
    sizes = [part.stat().st_size for part in paths]
    starts = np.cumsum([0, *sizes]).tolist()
    with create_again(path) as f:
        f.truncate(starts[-1])
        jobs = []
        for part, start, size in zip(paths, starts, sizes):
            for at in range(0, size, COPY_BYTES):
                count = min(COPY_BYTES, size - at)
                jobs.append((part, at, start + at, count))
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for _ in pool.map(lambda job: _copy(f.fileno(), *job), jobs):
                pass
        os.fsync(f.fileno())


def _copy(output: int, path: Path, source: int, target: int, count: int) -> None:
    with open(path, "rb") as f:
        while count:
            data = os.pread(f.fileno(), min(count, 1 << 22), source)
            if not data:
                raise DataError(
                    f"{path} became shorter while it was copied: another process writes to it. "
                    "Run the command again when it has ended."
                )
            view = memoryview(data)
            while view:
                written = os.pwrite(output, view, target)
                view = view[written:]
                target = target + written
            source = source + len(data)
            count = count - len(data)
