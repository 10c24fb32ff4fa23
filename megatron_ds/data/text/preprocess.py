"""From text to tokens on disk: files of text in, one `.bin/.idx` corpus for each key out.

One process reads blocks of lines or rows and writes; workers parse and tokenize. The order of the documents is that of the
input, for any number of workers, and only a few blocks for each worker are in memory.

    read ──► [block] [block] ──► workers ──► [tokens] ──► write, in order          in flight: at most 2 · workers + 1

A *shard* is the same for a stretch of the input (`text_files.slices_of_shard`); the shards one after the other are the
corpus (`merge.py`).
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from ...errors import DataError
from ..tokenizers import Tokenizer, arrays_of
from .corpus_record import CorpusRecord, PieceSums, done_before, remove_record, sha256_of
from .indexed import IndexedWriter, corpus_paths, dtype_for
from .json_lines import BadLine
from .orphans import end_with_parent
from .plain_text import TextCut
from .sentences import Splitter
from .text_files import (
    WHOLE_FILES,
    AnyBlock,
    check_files,
    is_plain_text,
    place_of,
    read_blocks,
    size_of,
    slices_of_shard,
    texts_of,
)

MakeTokenizer = Callable[[], Tokenizer]                     # is sent to the workers, so it must pickle
Shard = tuple[int, int]                                     # which, of how many
Column = tuple[np.ndarray, np.ndarray, np.ndarray]          # tokens; tokens of each sequence; sequences of each document
_tokenizer: Tokenizer | None = None                         # a worker's own, made once when the worker starts


@dataclass(frozen=True)
class Encoded:
    """A block, tokenized: a column for each key."""

    columns: list[Column]
    bad: list[BadLine]
    path: str
    position: int


@dataclass
class Written:
    """What has been written so far. done_before: nothing was to do."""

    documents: int = 0
    tokens: int = 0
    num_bad: int = 0
    bad: list[BadLine] = field(default_factory=list)        # the first of them
    done_before: bool = False


def output_prefix(prefix: str, key: str, sentences: bool = False) -> str:
    return f"{prefix}_{key}_{'sentence' if sentences else 'document'}"


def shard_prefix(prefix: str, shard: Shard) -> str:
    return f"{prefix}_{shard[0]:05d}_of_{shard[1]:05d}"


def preprocess(paths: Sequence[str], prefix: str, make_tokenizer: MakeTokenizer, *, json_keys: Sequence[str] = ("text",),
               append_eod: bool = False, workers: int = 1, skip_bad_lines: bool = False, sentences: Splitter | None = None,
               shard: Shard | None = None, cut: TextCut = WHOLE_FILES,
               progress: Callable[[str, int, Written], None] = lambda path, position, written: None) -> Written:
    """Write `{prefix}_{key}_document.bin/.idx` for every key, or `…_sentence` when texts are split into sentences.

    shard: (i, n) writes shard i of n, as `{prefix}_0000i_of_0000n_…`, if it is not there, whole and of the same making.
    cut: where the documents of plain text end.
    progress: called after each block with its file, the position in it and the sums so far.
    Raises DataError for a missing file, for a bad line unless they are skipped, and when nothing is left. After an error
    no output exists that did not exist before.
    """
    check_files(paths, json_keys)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # `workers` is how many cores are used, no library decides
    tokenizer = make_tokenizer()
    names = [output_prefix(shard_prefix(prefix, shard) if shard else prefix, key, sentences is not None) for key in json_keys]
    made_from = {"inputs": [_identity(path) for path in paths], "shard": list(shard or (0, 1)), "keys": list(json_keys),
                 "append_eod": append_eod, "skip_bad_lines": skip_bad_lines,
                 "sentences": sentences.fingerprint if sentences else None, "tokenizer": tokenizer.fingerprint,
                 **({"text": asdict(cut)} if any(map(is_plain_text, paths)) else {})}
    if shard and all(records := [done_before(name, {**made_from, "key": key}) for name, key in zip(names, json_keys)]):
        return Written(records[0].documents, sum(r.tokens for r in records), records[0].skipped, done_before=True)
    encode = partial(encode_block, keys=tuple(json_keys), eod=tokenizer.eod if append_eod else None,
                     dtype=dtype_for(tokenizer.vocab_size), sentences=sentences)
    blocks = (block for piece in slices_of_shard(paths, json_keys, *(shard or (0, 1)), cut=cut)
              for block in read_blocks(piece.path, keys=json_keys, start=piece.start, stop=piece.stop, cut=cut))
    written = Written()
    outputs = _Outputs(names, encode.keywords["dtype"])
    with outputs:
        for encoded in _encoded(blocks, encode, make_tokenizer, tokenizer, workers):
            outputs.append(encoded, written, skip_bad_lines)
            progress(encoded.path, encoded.position, written)
        if not written.documents and not shard:
            left = " is left" if written.num_bad else ""
            raise DataError(f"{_named(paths)}: not one document{left}. Nothing was written.")
    outputs.record(json_keys, written, tokenizer.fingerprint, made_from)
    return written


def _named(paths: Sequence[str], longest: int = 8) -> str:
    return f"{', '.join(paths[:longest])}{f' and {len(paths) - longest} others' if len(paths) > longest else ''}"


def _identity(path: str) -> list:
    """A file as it was when it was read: name, bytes, time of change in nanoseconds."""
    return [path, size_of(path), os.stat(path).st_mtime_ns if os.path.exists(path) else 0]


class _Outputs:
    """A writer and a checksum for every key."""

    def __init__(self, names: Sequence[str], dtype: np.dtype):
        self.names, self._dtype = names, dtype
        self._tokens, self._sums = [0] * len(names), [PieceSums() for _ in names]

    def __enter__(self) -> "_Outputs":
        with ExitStack() as stack:
            self._writers = [stack.enter_context(IndexedWriter(name, self._dtype)) for name in self.names]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, error, trace) -> bool | None:
        if kind is None:
            for name in self.names:
                remove_record(name)
        return self._stack.__exit__(kind, error, trace)

    def append(self, encoded: Encoded, written: Written, skip_bad_lines: bool) -> None:
        if encoded.bad and not skip_bad_lines:
            raise DataError(f"{encoded.bad[0]}. Nothing was written. Correct it, or leave out such lines, rows and "
                            "documents of plain text with --skip-bad-lines.")
        written.num_bad += len(encoded.bad)
        written.bad += encoded.bad[:10 - len(written.bad)]
        for i, (tokens, lengths, sequences) in enumerate(encoded.columns):
            try:
                self._writers[i].add_documents(tokens, lengths, sequences)
            except OSError as e:
                raise DataError(f"cannot write {self.names[i]}.bin: {e.strerror}. Nothing was kept; make room, or choose "
                                "another --output-prefix.") from None
            self._sums[i].update(tokens.view(np.uint8).data)
            self._tokens[i] += len(tokens)
            written.tokens += len(tokens)
        written.documents += len(encoded.columns[0][2])

    def record(self, keys: Sequence[str], written: Written, fingerprint: str, made_from: dict) -> None:
        for name, key, tokens, sums in zip(self.names, keys, self._tokens, self._sums):
            CorpusRecord(written.documents, tokens, fingerprint, sums.finish(), sha256_of(corpus_paths(name)[1]),
                         written.num_bad, {**made_from, "key": key}).write(name)


# ------------------------------------------------------------------------------------------------------------ encoding
def encode_block(block: AnyBlock, tokenizer: Tokenizer, *, keys: Sequence[str], eod: int | None, dtype: np.dtype,
                 sentences: Splitter | None = None) -> Encoded:
    texts, bad = texts_of(block, keys, sentences is not None)
    try:
        columns = [_column(column, tokenizer, eod, dtype, sentences) for column in texts]
    except DataError as error:
        raise DataError(f"{place_of(block)}: {error} Nothing was written.") from None
    return Encoded(columns, bad, block.path, block.position)


def _column(texts: list, tokenizer: Tokenizer, eod: int | None, dtype: np.dtype, sentences: Splitter | None) -> Column:
    """Sequences without tokens are left out, and a document without any has no sequence and no end, as in Megatron."""
    counts = np.ones(len(texts), np.int64)
    if sentences is not None:
        rows = [text if isinstance(text, list) else sentences.split(text) for text in texts]
        counts = np.array([len(row) for row in rows], np.int64)
        texts = [sentence for row in rows for sentence in row]
    ids, lengths = arrays_of(tokenizer, texts)
    document = np.repeat(np.arange(len(counts)), counts)[lengths > 0]       # of each sequence
    lengths = lengths[lengths > 0]
    if eod is not None:
        last = np.flatnonzero(np.diff(document, append=len(counts)))        # the last sequence of each document
        ids = np.insert(ids, np.cumsum(lengths)[last], eod)
        lengths[last] += 1
    return _narrow(ids, dtype), lengths, np.bincount(document, minlength=len(counts))


def _narrow(ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(dtype).max:
        raise DataError(f"the tokenizer gave ids from {ids.min()} to {ids.max()}, which do not fit {dtype}, the type for its "
                        "vocabulary size.")
    return ids.astype(dtype)


def _encoded(blocks: Iterable[AnyBlock], encode: partial, make_tokenizer: MakeTokenizer, tokenizer: Tokenizer,
             workers: int) -> Iterator[Encoded]:
    if workers <= 1:
        yield from (encode(block, tokenizer) for block in blocks)
        return
    # "spawn": a forked copy of a process that has threads (tokenizers has) may deadlock.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker,
                               (make_tokenizer, os.getpid()))
    try:
        pending = deque()
        for block in blocks:
            pending.append(pool.submit(_encode_here, encode, block))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process was killed, perhaps because memory ran out. Nothing was written. Use fewer "
                        "--workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(make_tokenizer: MakeTokenizer, parent: int) -> None:
    global _tokenizer
    end_with_parent(parent)
    _tokenizer = make_tokenizer()


def _encode_here(encode: partial, block: AnyBlock) -> Encoded:
    return encode(block, _tokenizer)
