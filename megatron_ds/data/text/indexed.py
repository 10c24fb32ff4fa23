"""The `.bin/.idx` corpus of Megatron, reading and writing.

A corpus is a list of *sequences* of token ids, grouped into *documents* (one sequence each for GPT, or one
per sentence). `.bin` holds the tokens back to back; `.idx`, little-endian, holds

    0        9         17     18       26       34        34+4S      34+12S      34+12S+8D
    | magic  | version | code | S      | D      | lengths | offsets  | documents | modes ... |
      9 B      u64=1     u8     u64      u64      i32 [S]   i64 [S]    i64 [D]     i8 [S], optional, ignored

S sequences; `lengths` in tokens, `offsets` in bytes; `documents[d]` is the first sequence of document d, with
S at the end, so D = documents + 1. A document may have no sequence at all.
"""

import contextlib
import difflib
import hashlib
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...errors import DataError
from ...host.content_hash import content_hash
from ...host.regular_file import create_again, discard, open_to_append

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
REAL_TYPES = {6: "float64", 7: "float32"}  # types of the format that hold no token ids
CODES = {np.dtype(t): code for code, t in DTYPES.items()}
CHECK_ROWS = 1 << 22  # rows or tokens checked together: bounds the memory of `check`
ROWS = 1 << 20  # of an index that is written, in memory together
# at most 256 blocks of 16384 lengths are hashed
FINGERPRINT_BLOCKS = 256
FINGERPRINT_BLOCK = 1 << 14


def dtype_for(vocab_size: int | None) -> np.dtype:
    """Return uint16 where all ids fit, else int32, by Megatron's rule (its limit is 65500, not 65536)."""
    if vocab_size is not None and vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


class IndexedDataset:
    """Sequences of a corpus, mapped into memory: `corpus[i]` is a read-only view without a copy.

    Opening reads the header and compares file sizes; `check` reads the whole index. Both raise DataError
    naming the file and the damage.

    lengths           int32 [S], tokens of each sequence
    offsets           int64 [S], byte of `.bin` at which each sequence begins
    document_indices  int64 [D], the first sequence of each document, and S
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        self.bin_path, self.idx_path = corpus_paths(prefix)
        # The columns of the index follow its header.
        index = _map(self.idx_path)
        self.dtype, num_sequences, num_bounds = _read_header(self.idx_path, index)
        self.lengths, at = _column(index, "<i4", num_sequences, HEADER.size)
        self.offsets, at = _column(index, "<i8", num_sequences, at)
        self.document_indices, _ = _column(index, "<i8", num_bounds, at)
        self._tokens = _map(self.bin_path)
        self._check_ends()

    def __len__(self) -> int:
        """Return the number of sequences (documents, in a GPT corpus)."""
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        if not -len(self) <= i < len(self):
            raise IndexError(
                f"there is no sequence {i}: {self.prefix} has {len(self)} sequences"
            )
        return self.get(i)

    def get(self, i: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence i from token `start` on; to its end when `length` is None."""
        if length is None:
            length = int(self.lengths[i]) - start
        at = int(self.offsets[i]) + start * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, length, at)

    @property
    def num_documents(self) -> int:
        """Number of documents, those without tokens included."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self._tokens) // self.dtype.itemsize

    def refuse_negative(self, ids: np.ndarray, place: str) -> None:
        """Raise DataError if a token id that was read from this corpus is below 0.

        Readers call it for each sample, because training takes −1 for padding. place: what the ids belong to,
        such as "sample 7"
        """
        if self.dtype.kind != "i" or not ids.size:
            return
        low = int(ids.min())
        if low < 0:
            raise DataError(
                f"{self.bin_path}: {place} has token id {low}, and ids begin at 0. "
                "Labels to ignore, or ids too large for their type, "
                "become negative numbers. Make the corpus again with megatron-ds "
                "preprocess."
            )

    def check_tokens(self) -> None:
        """Read all tokens. Raises DataError for the first block with a negative id; `check` does not."""
        # The tokens are read in blocks, which bounds the memory.
        tokens = np.frombuffer(self._tokens, self.dtype)
        if self.dtype.kind != "i":
            return
        for first in range(0, len(tokens), CHECK_ROWS):
            block = tokens[first : first + CHECK_ROWS]
            if block.min() < 0:
                token = first + int(np.argmax(block < 0))
                at = token * self.dtype.itemsize
                sequence = int(np.searchsorted(self.offsets, at, side="right")) - 1
                self.refuse_negative(block, f"sequence {sequence}")

    def fingerprint(self) -> str:
        """MD5 that distinguishes this corpus from another one that is later written under the same name.

        Hashes the numbers of sequences and tokens, and the lengths of the sequences: all of them, or evenly
        spaced blocks of a long corpus.
        """
        count = len(self)
        starts = range(0, count, FINGERPRINT_BLOCK)
        if len(starts) > FINGERPRINT_BLOCKS:
            last = count - FINGERPRINT_BLOCK
            spaced = np.linspace(0, last, FINGERPRINT_BLOCKS)
            starts = spaced.astype(np.int64).tolist()
        numbers = f"{count} {self.num_tokens} {self.dtype}"
        digest = hashlib.md5(numbers.encode(), usedforsecurity=False)
        for start in starts:
            block = self.lengths[start : start + FINGERPRINT_BLOCK]
            digest.update(block.tobytes())
        return digest.hexdigest()

    def key(self, documents: range) -> dict:
        """Return what identifies a range of documents in a cache: path, fingerprint and bounds, as JSON values."""
        key = {
            "dataset_path": str(self.bin_path.resolve())[:-4],
            "corpus": self.fingerprint(),
            "documents": [documents.start, documents.stop],
        }
        # Maps depend on all lengths, and the fingerprint of a long corpus is made of a part of them.
        is_whole = len(self) <= FINGERPRINT_BLOCKS * FINGERPRINT_BLOCK
        return key if is_whole else key | {"lengths": self._hash_of_lengths}

    @cached_property
    def _hash_of_lengths(self) -> str:
        return content_hash([self.lengths])

    def check(self) -> None:
        """Check every row of the index. Raises DataError for the first one that points outside the tokens."""
        end = 0
        # Each sequence begins at the byte where the one before it ends.
        for first in range(0, len(self), CHECK_ROWS):
            lengths = self.lengths[first : first + CHECK_ROWS].astype(np.int64)
            offsets = self.offsets[first : first + CHECK_ROWS]
            sizes = lengths * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            bad = (lengths < 0) | (offsets != ends - sizes)
            if bad.any():
                i = int(np.argmax(bad))
                raise _damaged(
                    self.idx_path,
                    f"sequence {first + i} has length {lengths[i]} and byte offset "
                    f"{offsets[i]}, which does not continue the sequence before it",
                )
            end = int(ends[-1])
        # Documents begin in ascending order. Blocks overlap by one boundary.
        for first in range(0, len(self.document_indices), CHECK_ROWS):
            bounds = self.document_indices[first : first + CHECK_ROWS + 1]
            if (bounds[1:] < bounds[:-1]).any():
                raise _damaged(self.idx_path, "the document boundaries go backwards")

    def _check_ends(self) -> None:
        """Raise DataError unless the index ends where the tokens do, and the documents where the sequences do."""
        size = len(self._tokens)
        end = 0
        if len(self):
            last = int(self.lengths[-1]) * self.dtype.itemsize
            end = int(self.offsets[-1]) + last
        if size != end:
            kind = "truncated" if size < end else "too long"
            raise _damaged(
                self.bin_path,
                f"it is {kind}: {size} bytes where {self.idx_path} describes {end}",
            )
        bounds = self.document_indices
        if not len(bounds):
            return
        if bounds[0] != 0 or bounds[-1] != len(self):
            raise _damaged(
                self.idx_path,
                f"the documents cover sequences {bounds[0]} to {bounds[-1]} of "
                f"{len(self)}",
            )


class IndexedWriter:
    """Writes a corpus under temporary names and renames it at the end, the index last.

    A context manager: an exception inside removes what was written. A killed process leaves only `*.partial`,
    which readers ignore and the next writer overwrites.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type):
        self.dtype = np.dtype(dtype)
        assert self.dtype in CODES, f"{self.dtype} has no code in the format"
        self.bin_path, self.idx_path = corpus_paths(prefix)
        paths = (self.bin_path, self.idx_path)
        self._partial = [Path(f"{path}.partial") for path in paths]
        # The index stays in memory until the end; the tokens are written as they come.
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._low, self._high = _limits(self.dtype)
        try:
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._bin = _open_alone(self._partial[0])
        except OSError as e:
            raise DataError(
                f"cannot write {self.bin_path}: {e.strerror}. Choose another output "
                "prefix."
            ) from None

    def add_document(
        self, tokens: Sequence[int] | np.ndarray, lengths: Iterable[int] | None = None
    ) -> None:
        """Add a document of one sequence, or of sequences of these lengths. A document without tokens and lengths
        has no sequence."""
        # A document without lengths is one sequence, or none.
        ids = np.ascontiguousarray(tokens)
        if lengths is None:
            lengths = [len(ids)] if len(ids) else []
        else:
            lengths = list(lengths)
        assert sum(lengths) == len(ids), f"{len(ids)} tokens in sequences of {lengths}"
        if len(ids) and (ids.min() < self._low or ids.max() > self._high):
            raise DataError(
                f"token ids from {ids.min()} to {ids.max()} do not fit {self.dtype} in "
                f"{self.bin_path}: the vocabulary is larger than that of the file."
            )
        sequences = np.array([len(lengths)])
        cast = ids.astype(self.dtype, copy=False)
        self.add_documents(cast, np.array(lengths, np.int64), sequences)

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray
    ) -> None:
        """Add documents: all tokens, of this dtype; tokens of each sequence; sequences of each document."""
        assert (
            tokens.dtype == self.dtype
            and len(tokens) == lengths.sum()
            and len(lengths) == sequences.sum()
        )
        self._bin.write(tokens.data)
        # The boundary after each document counts the sequences so far.
        first = len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        bounds = first + np.cumsum(sequences, dtype=np.int64)
        self._documents.frombytes(bounds.tobytes())

    def finish(self) -> None:
        """Flush both files to disk, then rename them, `.idx` last."""
        _sync(self._bin)
        lengths = np.frombuffer(self._lengths, np.int32)
        documents = np.frombuffer(self._documents, np.int64)
        code = CODES[self.dtype]
        with create_again(self._partial[1]) as f:
            write_index(f, code, self.dtype.itemsize, [(lengths, documents)])
            _sync(f)
        # The index of an older corpus must never be next to the new tokens.
        self.idx_path.unlink(missing_ok=True)
        self._partial[0].replace(self.bin_path)
        self._partial[1].replace(self.idx_path)

    def discard(self) -> None:
        """Remove what was written."""
        discard(self._bin, *self._partial)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return self.discard()
        try:
            self.finish()
        except OSError as e:
            self.discard()
            raise DataError(
                f"cannot write {self.bin_path}: {e.strerror}. Nothing was kept."
            ) from None


def write_index(
    file: BinaryIO, code: int, item: int, parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Write an index.

    code   of the token type
    item   bytes of a token
    parts  corpora in order, each as its (lengths, document indices)
    """

    def blocks(column: np.ndarray) -> Iterator[np.ndarray]:
        for first in range(0, len(column), ROWS):
            yield column[first : first + ROWS].astype(np.int64)

    # The header counts the sequences and documents of all corpora.
    num_sequences = sum(len(lengths) for lengths, _ in parts)
    num_documents = sum(len(documents) - 1 for _, documents in parts)
    file.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, num_documents + 1))
    for lengths, _ in parts:
        for rows in blocks(lengths):
            file.write(rows.astype("<i4").tobytes())
    # Offsets count bytes from the beginning of the first corpus.
    offset = 0
    for lengths, _ in parts:
        for rows in blocks(lengths):
            sizes = rows * item
            ends = offset + np.cumsum(sizes)
            starts = ends - sizes
            file.write(starts.astype("<i8").tobytes())
            offset = int(ends[-1])
    # So do the boundaries of documents, in sequences.
    before = 0
    file.write(np.zeros(1, "<i8").tobytes())
    for lengths, documents in parts:
        for rows in blocks(documents[1:]):
            file.write((rows + before).astype("<i8").tobytes())
        before += len(lengths)


@contextlib.contextmanager
def replacing(path: Path, advice: str) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends. Raises DataError when the disk is full."""
    beside = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_again(beside) as file:
            yield file
            _sync(file)
        beside.replace(path)
    except OSError as e:
        raise DataError(f"cannot write {path}: {e.strerror}. {advice}") from None
    finally:
        beside.unlink(missing_ok=True)


def corpus_paths(prefix: str | os.PathLike) -> tuple[Path, Path]:
    """Return `.bin` and `.idx` of a prefix, or of the name of either file."""
    text = os.fspath(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


def _map(path: Path) -> memoryview:
    """Return the bytes of a file, mapped into memory. Raises DataError when it cannot be read."""
    try:
        # An empty file cannot be mapped.
        if path.stat().st_size == 0:
            return memoryview(b"")
        return np.memmap(path, np.uint8, "r").data
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. A data path is the prefix of a .bin/.idx pair, as "
            f"megatron-ds preprocess writes them. {_corpora_near(path)}"
        ) from None
    except OSError as e:
        raise DataError(f"cannot read {path}: {e.strerror}.") from None


def _corpora_near(path: Path) -> str:
    """Name existing corpora, one of which a wrong path may have meant."""
    folder = path.with_suffix("")
    if not folder.is_dir():
        folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {folder}."
    # The corpora of the folder, of which one may have a similar name.
    indexes = folder.glob("*.idx")
    pairs = sorted(p.stem for p in indexes if p.with_suffix(".bin").exists())
    if not pairs:
        return f"In {folder.resolve()} there is no such pair."
    near = []
    if path.stem != ".idx":
        near = difflib.get_close_matches(path.stem, pairs, n=1)
    near = near or pairs[:8]
    verb = "is" if len(near) == 1 else "are"
    return f"In {folder.resolve()} there {verb} {', '.join(near)}."


def _read_header(path: Path, index: memoryview) -> tuple[np.dtype, int, int]:
    """Return (type of the tokens, number of sequences, number of document boundaries). Raises DataError."""
    if len(index) < HEADER.size:
        raise _damaged(
            path, f"it has {len(index)} bytes, fewer than its header of {HEADER.size}"
        )
    header = HEADER.unpack(index[: HEADER.size])
    magic, version, code, num_sequences, num_bounds = header
    if magic != MAGIC:
        kind = "not an index of this format"
        if magic[:6] == b"TNTIDX":
            kind = "an index of the older fairseq format"
        raise _damaged(path, f"it begins with {magic!r}, not {MAGIC!r}: {kind}")
    if version != VERSION:
        raise _damaged(
            path, f"its version is {version}; only version {VERSION} is supported"
        )
    if code in REAL_TYPES:
        raise DataError(
            f"{path}: its tokens are {REAL_TYPES[code]} numbers, "
            "and token ids are integers. Write the corpus again as uint16 or "
            "int32."
        )
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise _damaged(path, f"its token type has code {code}; known codes are {known}")
    # A file of another size than the header implies was cut off or overwritten.
    size = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(index) not in (size, size + num_sequences):  # the longer one has modes
        kind = "truncated" if len(index) < size else "too long"
        raise _damaged(
            path,
            f"it is {kind}: {len(index)} bytes where {num_sequences} sequences and "
            f"{num_bounds} document boundaries take {size}",
        )
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    return dtype, num_sequences, num_bounds


def _column(
    index: memoryview, dtype: str, count: int, at: int
) -> tuple[np.ndarray, int]:
    """Return `count` numbers at byte `at`, and the byte after them."""
    end = at + count * np.dtype(dtype).itemsize
    return np.frombuffer(index, dtype, count, at), end


def _limits(dtype: np.dtype) -> tuple[int, int]:
    """Return the lowest and the highest token id of a type."""
    info = np.iinfo(dtype)
    return max(info.min, 0), info.max


def _open_alone(path: Path) -> BinaryIO:
    """Open an empty file for writing. Raises DataError if another process is writing it, or if the name is a
    link or no regular file: another user may have put it there, and its target would be overwritten.
    """
    while True:
        file = open_to_append(path, DataError)
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(
                f"{path} is being written by another process. "
                "Wait for it or end it, or choose another output prefix."
            ) from None
        except (ImportError, OSError):
            pass  # an operating system or file system without locks
        # The other process may have finished and renamed the file in between.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            return file
        file.close()


def _sync(file: BinaryIO) -> None:
    """Close a file whose content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _damaged(path: Path, what: str) -> DataError:
    """Return the error to raise for a damaged file."""
    return DataError(
        f"{path} is damaged: {what}. Copy it again, or make it again with "
        "megatron-ds preprocess."
    )
