"""From text to tokens on disk: JSON lines in, one `.bin/.idx` corpus for each JSON key out.

One process reads blocks of lines and writes; workers parse and tokenize. The order of the documents is that of the lines,
for any number of workers, and only a few blocks for each worker are in memory.

    read ──► [block] [block] ──► workers ──► [tokens] ──► write, in order          in flight: at most 2 · workers + 1
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import DataError
from .indexed import IndexedWriter, dtype_for
from .json_lines import BadLine, Block, check_files, read_blocks, texts_of
from .tokenizers import Tokenizer

MakeTokenizer = Callable[[], Tokenizer]                     # is sent to the workers, so it must pickle
_tokenizer: Tokenizer | None = None                         # a worker's own, made once when the worker starts


@dataclass(frozen=True)
class Encoded:
    """A block, tokenized: for each key all tokens, and the length of each document in order."""

    columns: list[tuple[np.ndarray, np.ndarray]]
    bad: list[BadLine]
    path: str
    position: int


@dataclass
class Written:
    """What has been written so far."""

    documents: int = 0
    tokens: int = 0
    bad: list[BadLine] = field(default_factory=list)


def output_prefix(prefix: str, key: str) -> str:
    return f"{prefix}_{key}_document"


def preprocess(paths: Sequence[str], prefix: str, make_tokenizer: MakeTokenizer, *, json_keys: Sequence[str] = ("text",),
               append_eod: bool = False, workers: int = 1, skip_bad_lines: bool = False,
               progress: Callable[[str, int, Written], None] = lambda path, position, written: None) -> Written:
    """Write `{prefix}_{key}_document.bin/.idx` for every key.

    progress: called after each block with its file, the position in it and the sums so far.
    Raises DataError for a missing file, for a bad line unless they are skipped, and when nothing is left. After an error
    no output exists that did not exist before.
    """
    check_files(paths)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")    # `workers` is how many cores are used, no library decides
    tokenizer, written = make_tokenizer(), Written()
    dtype, eod = dtype_for(tokenizer.vocab_size), tokenizer.eod if append_eod else None
    blocks = (block for path in paths for block in read_blocks(path))
    encode = partial(encode_block, keys=tuple(json_keys), eod=eod, dtype=dtype)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(output_prefix(prefix, key), dtype)) for key in json_keys]
        for encoded in _encoded(blocks, encode, make_tokenizer, tokenizer, workers):
            _append(encoded, writers, written, skip_bad_lines)
            progress(encoded.path, encoded.position, written)
        if not written.documents:
            raise DataError(f"{', '.join(paths)}: not one document{' is left' if written.bad else ''}. Nothing was written.")
    return written


def encode_block(block: Block, tokenizer: Tokenizer, *, keys: Sequence[str], eod: int | None, dtype: np.dtype) -> Encoded:
    texts, bad = texts_of(block, keys)
    try:
        columns = [_column(tokenizer.encode_batch(column), eod, dtype) for column in texts]
    except DataError as error:
        last = block.first_line + len(block.lines) - 1
        raise DataError(f"{block.path}, in lines {block.first_line} to {last}: {error} Nothing was written.") from None
    return Encoded(columns, bad, block.path, block.position)


def _column(documents: list[list[int]], eod: int | None, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    if eod is not None:
        for ids in documents:
            if ids:                                         # as in Megatron, an empty document stays empty
                ids.append(eod)
    lengths = np.array([len(ids) for ids in documents], np.int64)
    tokens = np.fromiter((i for ids in documents for i in ids), dtype, int(lengths.sum()))
    return tokens, lengths


def _append(encoded: Encoded, writers: Sequence[IndexedWriter], written: Written, skip_bad_lines: bool) -> None:
    if encoded.bad and not skip_bad_lines:
        raise DataError(f"{encoded.bad[0]}. Nothing was written. Mend the line, or leave out such lines with "
                        "--skip-bad-lines.")
    written.bad += encoded.bad
    for writer, (tokens, lengths) in zip(writers, encoded.columns):
        start = 0
        for length in lengths.tolist():
            writer.add_document(tokens[start:start + length])
            start += length
        written.tokens += start
    written.documents += len(encoded.columns[0][1])


def _encoded(blocks: Iterable[Block], encode: partial, make_tokenizer: MakeTokenizer, tokenizer: Tokenizer,
             workers: int) -> Iterator[Encoded]:
    if workers <= 1:
        yield from (encode(block, tokenizer) for block in blocks)
        return
    # "spawn": a forked copy of a process that has threads (tokenizers has) may deadlock.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (make_tokenizer,))
    try:
        pending = deque()
        for block in blocks:
            pending.append(pool.submit(_encode_here, encode, block))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process died, perhaps for want of memory. Nothing was written. Try fewer "
                        "--workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(make_tokenizer: MakeTokenizer) -> None:
    global _tokenizer
    _tokenizer = make_tokenizer()


def _encode_here(encode: partial, block: Block) -> Encoded:
    return encode(block, _tokenizer)
