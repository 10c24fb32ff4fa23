"""Several corpora into one, each copied to its place at the same time.

    a.bin |--- a ---|        merged.bin |--- a ---|- b -|------ c ------|      where each begins is known from the sizes,
    b.bin |- b -|                                                              so the copies need not wait for each other
    c.bin |------ c ------|  merged.idx   lengths of a, b, c; byte offsets anew; documents of b counted on from those of a

The result is complete or invisible: it is written beside and renamed, `.idx` last.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ...errors import DataError
from .corpus_record import CorpusRecord, Piece, read_record, remove_record, sha256_of
from .indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset, corpus_paths

COPY_BYTES = 1 << 26                                        # copied by one call
ROWS = 1 << 20                                              # of an index, in memory together


def merge(prefixes: Sequence[str], output: str, *, workers: int = 4) -> CorpusRecord | None:
    """Write `output.bin/.idx` with the documents of all corpora in order; and the record, if each of them has one.

    workers: threads that copy.  Raises DataError for a damaged corpus, for corpora of different token types or tokenizers,
    and when the disk is full; then nothing is written.
    """
    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    records = [read_record(prefix) for prefix in prefixes]
    _check(prefixes, corpora, records, output)
    bin_path, idx_path = corpus_paths(output)
    partial = [Path(f"{path}.partial") for path in (bin_path, idx_path)]
    try:
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        _write_tokens(corpora, partial[0], workers)
        _write_index(corpora, partial[1])
        remove_record(output)
        idx_path.unlink(missing_ok=True)                    # an old index must not stand beside new tokens
        partial[0].replace(bin_path)
        partial[1].replace(idx_path)
    except OSError as e:
        raise DataError(f"cannot write {output}: {e.strerror or e}. Nothing was kept; make room, or choose another "
                        "--output-prefix.") from None
    finally:
        for path in partial:
            with contextlib.suppress(OSError):
                path.unlink()
    record = _merged(records, corpora, idx_path)
    if record:
        record.write(output)
    return record


def _check(prefixes: Sequence[str], corpora: Sequence[IndexedDataset], records: Sequence[CorpusRecord | None],
           output: str) -> None:
    if not corpora:
        raise DataError("no corpora to merge.")
    if corpus_paths(output)[0].resolve() in (corpus_paths(prefix)[0].resolve() for prefix in prefixes):
        raise DataError(f"--output-prefix {output} is one of the corpora to merge. Choose another name.")
    for prefix, corpus in zip(prefixes, corpora):
        if corpus.dtype != corpora[0].dtype:
            raise DataError(f"{prefix} has tokens of type {corpus.dtype} and {prefixes[0]} of {corpora[0].dtype}: they were "
                            "made with vocabularies of different size. Make one of them again.")
        corpus.check()
    known = [(prefix, record) for prefix, record in zip(prefixes, records) if record and record.tokenizer]
    for prefix, record in known:
        if record.tokenizer != known[0][1].tokenizer:
            raise DataError(f"{prefix} was made with the tokenizer {record.tokenizer} and {known[0][0]} with "
                            f"{known[0][1].tokenizer}: the same id means different text in them.")


def _write_tokens(corpora: Sequence[IndexedDataset], path: Path, workers: int) -> None:
    sizes = [corpus.bin_path.stat().st_size for corpus in corpora]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    with open(path, "wb") as f:
        f.truncate(sum(sizes))
        jobs = [(corpus.bin_path, at, start + at, min(COPY_BYTES, size - at))
                for corpus, start, size in zip(corpora, starts, sizes) for at in range(0, size, COPY_BYTES)]
        with ThreadPoolExecutor(max(1, workers)) as pool:
            for _ in pool.map(lambda job: _copy(f.fileno(), *job), jobs):
                pass
        os.fsync(f.fileno())


def _copy(output: int, path: Path, source: int, target: int, count: int) -> None:
    with open(path, "rb") as f:
        while count:
            data = os.pread(f.fileno(), min(count, 1 << 22), source)
            if not data:
                raise DataError(f"{path} became shorter while it was copied.")
            view = memoryview(data)
            while view:
                written = os.pwrite(output, view, target)
                view, target = view[written:], target + written
            source, count = source + len(data), count - len(data)


def _write_index(corpora: Sequence[IndexedDataset], path: Path) -> None:
    sequences, documents = sum(map(len, corpora)), sum(corpus.num_documents for corpus in corpora)
    item = corpora[0].dtype.itemsize
    with open(path, "wb") as f:
        f.write(HEADER.pack(MAGIC, VERSION, CODES[corpora[0].dtype.newbyteorder("=")], sequences, documents + 1))
        for corpus in corpora:
            for rows in _pieces(corpus.lengths):
                f.write(rows.tobytes())
        for rows in _shifted((corpus.offsets for corpus in corpora), [corpus.num_tokens * item for corpus in corpora]):
            f.write(rows.tobytes())
        f.write(np.zeros(1, "<i8").tobytes())
        for rows in _shifted((corpus.document_indices[1:] for corpus in corpora), list(map(len, corpora))):
            f.write(rows.tobytes())
        f.flush()
        os.fsync(f.fileno())


def _pieces(column: np.ndarray) -> Iterator[np.ndarray]:
    return (column[first:first + ROWS] for first in range(0, len(column), ROWS))


def _shifted(columns: Iterable[np.ndarray], sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """The columns, each counted on from the sum of the sizes before it."""
    before = 0
    for column, size in zip(columns, sizes):
        for rows in _pieces(column):
            yield (rows + before).astype("<i8")
        before += size


def _merged(records: Sequence[CorpusRecord | None], corpora: Sequence[IndexedDataset], idx_path: Path) -> CorpusRecord | None:
    if not all(records):
        return None
    pieces: list[Piece] = [piece for record in records for piece in record.pieces]
    return CorpusRecord(sum(corpus.num_documents for corpus in corpora), sum(corpus.num_tokens for corpus in corpora),
                        records[0].tokenizer, pieces, sha256_of(idx_path), sum(record.skipped for record in records))
