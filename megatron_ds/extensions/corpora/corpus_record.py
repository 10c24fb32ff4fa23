"""`{prefix}.json`, the record of a corpus: its inputs and options, and checksums of its bytes.

The record is written after the `.bin/.idx` pair is complete, and removed before a new pair replaces the old
one. So a shard is complete exactly when it has the record that its command would write. The pair itself holds
no checksums, as in Megatron, and training does not read the record; `megatron-ds inspect --check`
compares.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path

from ...data.text.indexed import IndexedDataset, corpus_paths, replacing
from ...data.text.mask_file import LossMasks, mask_path
from ...errors import DataError
from ...host.regular_file import read_regular

PIECE_BYTES = 1 << 26
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FilePiece:
    """At most PIECE_BYTES consecutive bytes of `.bin`; a merged corpus keeps the pieces of its parts."""

    bytes: int
    sha256: str


class PieceSums:
    """The pieces of a file that is written front to back."""

    def __init__(self):
        self._pieces: list[FilePiece] = []
        self._digest = hashlib.sha256()
        self._bytes = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes; `data` has items of one byte."""
        while len(data):
            now = data[: PIECE_BYTES - self._bytes]
            self._digest.update(now)
            self._bytes = self._bytes + len(now)
            data = data[len(now) :]
            if self._bytes == PIECE_BYTES:
                self._end_piece()

    def finish(self) -> list[FilePiece]:
        """All pieces; at least one, which may be empty."""
        if self._bytes or not self._pieces:
            self._end_piece()
        return self._pieces

    def _end_piece(self) -> None:
        self._pieces.append(FilePiece(self._bytes, self._digest.hexdigest()))
        self._digest = hashlib.sha256()
        self._bytes = 0


@dataclass(frozen=True)
class CorpusRecord:
    """The checksums and the origin of a corpus, stored next to it as JSON.

    made_from    all inputs and options that determine the bytes; {} for a corpus merged from several
    mask_sha256  of the loss masks of a corpus of conversations, else None
    """

    documents: int
    tokens: int
    tokenizer: str | None
    pieces: list[FilePiece]
    idx_sha256: str
    skipped: int = 0
    made_from: dict = field(default_factory=dict)
    mask_sha256: str | None = None

    def write(self, prefix: str) -> None:
        """Replace the record there. Raises DataError when the disk is full."""
        with replacing(
            record_path(prefix), "Free some space and run the command again."
        ) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())


def record_path(prefix: str | os.PathLike) -> Path:
    """Path of the record of a corpus: `{prefix}.json`."""
    return Path(str(corpus_paths(prefix)[0])[:-4] + ".json")


def read_record(prefix: str | os.PathLike) -> CorpusRecord | None:
    """Return the record, or None where there is none.  Raises DataError for a file that is not a record."""
    path = record_path(prefix)
    try:
        values = json.loads(read_regular(path, DataError))
        return CorpusRecord(
            **{**values, "pieces": [FilePiece(**piece) for piece in values["pieces"]]}
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise DataError(
            f"{path} is not the record of a corpus: {e}. Remove it; the corpus then has no "
            "checksums."
        ) from None


def remove_record(prefix: str | os.PathLike) -> None:
    """Remove the record if there is one."""
    record_path(prefix).unlink(missing_ok=True)


def done_before(prefix: str, made_from: dict) -> CorpusRecord | None:
    """Return the record of a complete corpus that was made from the same inputs and options, else None."""
    try:
        record = read_record(prefix)
        if record is None or record.made_from != made_from:
            return None
        corpus = IndexedDataset(prefix)
        if record.mask_sha256:
            LossMasks(corpus)
    except DataError:
        return None
    return (
        record
        if (corpus.num_documents, corpus.num_tokens)
        == (record.documents, record.tokens)
        else None
    )


def record_of(
    prefix: str | os.PathLike, run: Callable[..., Iterable] = map
) -> CorpusRecord:
    """Return a record of the files as they are, for a corpus without one.  run: `map`, or that of a thread pool."""
    corpus = IndexedDataset(prefix)
    size = corpus.bin_path.stat().st_size
    spans = [
        (start, min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES)
    ]
    digests = run(lambda span: _digest(corpus.bin_path, *span), spans)
    pieces = [FilePiece(count, digest) for (_, count), digest in zip(spans, digests)]
    masks = mask_path(prefix)
    return CorpusRecord(
        corpus.num_documents,
        corpus.num_tokens,
        None,
        pieces,
        sha256_of(corpus.idx_path),
        mask_sha256=sha256_of(masks) if masks.is_file() else None,
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal digits."""
    return _digest(path, 0, path.stat().st_size)


def check_sums(
    prefix: str | os.PathLike, record: CorpusRecord, run: Callable[..., Iterable] = map
) -> None:
    """Raises DataError for the first piece whose checksum differs.  run: `map`, or that of a thread pool."""
    bin_path, idx_path = corpus_paths(prefix)
    size = bin_path.stat().st_size
    recorded = sum(piece.bytes for piece in record.pieces)
    if size != recorded:
        raise DataError(
            f"{bin_path} has {size} bytes, and {record_path(prefix)} describes {recorded}: the "
            "two do not belong together. Copy both again."
        )
    # Pieces may be read at the same time, and a damaged one is named by its bytes.
    starts = list(accumulate((piece.bytes for piece in record.pieces), initial=0))
    spans = [(start, piece.bytes) for start, piece in zip(starts, record.pieces)]
    for piece, start, found in zip(
        record.pieces, starts, run(lambda span: _digest(bin_path, *span), spans)
    ):
        if found != piece.sha256:
            raise DataError(
                f"{bin_path} is damaged between bytes {start:,} and {start + piece.bytes:,}: "
                "their SHA-256 is not the recorded one. Copy the file again, or make it again "
                "with megatron-ds preprocess."
            )
    if sha256_of(idx_path) != record.idx_sha256:
        raise DataError(
            f"{idx_path} is damaged: its SHA-256 is not the recorded one. Copy it again."
        )
    if record.mask_sha256 is None:
        return
    masks = mask_path(prefix)
    if not masks.is_file():
        raise DataError(
            f"{masks} does not exist, and {record_path(prefix)} has its checksum. Copy it again."
        )
    if sha256_of(masks) != record.mask_sha256:
        raise DataError(
            f"{masks} is damaged: its SHA-256 is not the recorded one. Copy it again."
        )


def _digest(path: Path, start: int, count: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        f.seek(start)
        while count and (chunk := f.read(min(count, CHUNK_BYTES))):
            digest.update(chunk)
            count -= len(chunk)
    return digest.hexdigest()
