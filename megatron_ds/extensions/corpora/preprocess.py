"""From text to tokens on disk: text files in, one `.bin/.idx` corpus for each key out.

The main process reads blocks of lines or rows and writes; workers parse and tokenize. Documents keep the
order of the input for any number of workers, and only a few blocks for each worker are in memory.

    read ──► [block] [block] ──► workers ──► [tokens] ──► write, in order     at most 2 · workers + 1 blocks

A *shard* is the same for a range of the input (`text_files.slices_of_shard`); the shards one after the other
are the corpus (`corpus_shards.py`).
"""

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from ...data.text.indexed import IndexedWriter, corpus_paths, dtype_for
from ...data.text.mask_file import MaskWriter, mask_path
from ...data.tokenizers import Tokenizer, arrays_of
from ...errors import DataError
from ..chat.loss_masks import Doubts, add_doubts
from ..chat.template import ChatTemplate
from .corpus_record import (
    CorpusRecord,
    PieceSums,
    done_before,
    remove_record,
    sha256_of,
)
from .encode_chats import encode_chats
from .plain_text import TextCut
from .sentences import Splitter
from .text_files import (
    check_files,
    is_plain_text,
    read_blocks,
    size_of,
    slices_of_shard,
    texts_of,
)
from .text_records import BadLine, TextBlock, place_of

MakeTokenizer = Callable[[], Tokenizer]  # is sent to the workers, so it is pickled
Shard = tuple[int, int]  # (index, number of shards)
# Tokens, sequence lengths, sequences of each document.
Column = tuple[np.ndarray, np.ndarray, np.ndarray]
PARENT_CHECK_SECONDS = 1.0
_tokenizer: Tokenizer | None = None  # of a worker process, made when the worker starts


@dataclass(frozen=True)
class PreprocessOptions:
    """What decides the bytes of a corpus, besides its inputs and its tokenizer.

    json_keys        keys of JSON lines or columns of tables; each makes a corpus
    append_eod       end each document with the end-of-document token
    skip_bad_lines   leave out lines that hold no usable document, instead of failing
    sentences        store each sentence as a sequence of its own, split by this
    cut              where plain text documents end
    chat             each record is a conversation, and becomes text by this template
    preference       each record is a pair of conversations, a chosen and a rejected one, which are the sequences of a
                     document
    """

    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False
    sentences: Splitter | None = None
    cut: TextCut = TextCut()
    chat: ChatTemplate | None = None
    preference: bool = False


DEFAULTS = PreprocessOptions()


@dataclass(frozen=True)
class Encoded:
    """A tokenized block: a column for each key. That of conversations has a mask, uint8 [n], 1 for tokens to learn.

    doubts: what is probably not meant in its conversations
    """

    columns: list[Column]
    bad: list[BadLine]
    path: str
    position: int
    mask: np.ndarray | None = None
    doubts: Doubts = field(default_factory=dict)


@dataclass
class Written:
    """Counts of what has been written so far. done_before: the corpus was complete already; doubts: as in
    `Encoded`."""

    documents: int = 0
    tokens: int = 0
    num_bad: int = 0
    doubts: Doubts = field(default_factory=dict)
    bad: list[BadLine] = field(default_factory=list)  # the first ten
    done_before: bool = False


def output_prefix(prefix: str, key: str, sentences: bool = False) -> str:
    """`{prefix}_{key}_document`, or `…_sentence`."""
    return f"{prefix}_{key}_{'sentence' if sentences else 'document'}"


def shard_prefix(prefix: str, shard: Shard) -> str:
    """`{prefix}_00001_of_00004`."""
    return f"{prefix}_{shard[0]:05d}_of_{shard[1]:05d}"


def preprocess(
    paths: Sequence[str],
    prefix: str,
    make_tokenizer: MakeTokenizer,
    options: PreprocessOptions = DEFAULTS,
    *,
    workers: int = 1,
    shard: Shard | None = None,
    progress: Callable[[str, int, Written], None] = lambda *_: None,
) -> Written:
    """Write `{prefix}_{key}_document.bin/.idx` for every key; `…_sentence` for texts split into sentences.

    shard: (i, n) writes shard i of n, `{prefix}_0000i_of_0000n_…`, unless it is complete and was made the
    same way.
    progress: called after each block with its file, the position in the file and the counts so far.
    Raises DataError for a missing file, for a bad line unless they are skipped, and when no document is left.
    An error leaves no output that did not exist before.
    """
    # Check the files before the tokenizer is loaded, which takes longer.
    keys = options.json_keys
    check_files(paths, keys)
    # The library would use all cores in each worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = make_tokenizer()
    names = _names(prefix, options, shard)
    made_from = _made_from(paths, options, shard, tokenizer)
    # A shard that is complete is not made again.
    if shard and (done := _done_before(names, keys, made_from)):
        return done
    # The input may be larger than memory, so it is processed block by block.
    dtype = dtype_for(tokenizer.vocab_size)
    eod = tokenizer.eod if options.append_eod else None
    encode = partial(encode_block, options=options, eod=eod, dtype=dtype)
    blocks = _blocks(paths, options, shard or (0, 1))
    written = Written()
    sums = [PieceSums() for _ in names]
    masks: MaskWriter | None = None

    def withdraw(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and masks is not None:
            masks.withdraw()

    with ExitStack() as stack:
        stack.push(withdraw)
        writers = [stack.enter_context(IndexedWriter(name, dtype)) for name in names]
        # The masks are complete before the index that vouches for them.
        masks = stack.enter_context(MaskWriter(names[0])) if options.chat else None
        for encoded in _encoded(blocks, encode, make_tokenizer, tokenizer, workers):
            _write(encoded, writers, sums, written, options.skip_bad_lines)
            if masks is not None:
                assert encoded.mask is not None  # of conversations
                masks.add(encoded.mask)
            progress(encoded.path, encoded.position, written)
        if not written.documents and not shard:
            raise DataError(_nothing_found(paths, written))
        for name in names:
            remove_record(name)
    # Records come last: they vouch for complete files.
    for name, key, each in zip(names, keys, sums):
        _record(name, each, written, tokenizer, options, made_from | {"key": key})
    return written


def _record(
    name: str,
    sums: PieceSums,
    written: Written,
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    made_from: dict,
) -> None:
    """Write the record of a complete corpus."""
    pieces = sums.finish()
    CorpusRecord(
        written.documents,
        sum(piece.bytes for piece in pieces)
        // dtype_for(tokenizer.vocab_size).itemsize,
        tokenizer.fingerprint,
        pieces,
        sha256_of(corpus_paths(name)[1]),
        written.num_bad,
        made_from,
        None if options.chat is None else sha256_of(mask_path(name)),
    ).write(name)


def _names(prefix: str, options: PreprocessOptions, shard: Shard | None) -> list[str]:
    """Return the prefixes of the corpora, one for each key."""
    prefix = shard_prefix(prefix, shard) if shard else prefix
    split = options.sentences is not None
    return [output_prefix(prefix, key, split) for key in options.json_keys]


def _done_before(
    names: Sequence[str], keys: Sequence[str], made_from: dict
) -> Written | None:
    """Return the counts of a shard that is complete; None if a corpus is missing or was made in another way."""
    records = [
        record
        for name, key in zip(names, keys)
        if (record := done_before(name, {**made_from, "key": key})) is not None
    ]
    if len(records) < len(names):
        return None
    tokens = sum(record.tokens for record in records)
    first = records[0]
    return Written(first.documents, tokens, first.skipped, done_before=True)


def _nothing_found(paths: Sequence[str], written: Written) -> str:
    """Return the error of an input without documents."""
    named = ", ".join(paths[:8])
    if len(paths) > 8:
        named += f" and {len(paths) - 8} others"
    only_bad = ", only bad lines" if written.num_bad else ""
    return f"{named}: the input has no documents{only_bad}. Nothing was written."


def _made_from(
    paths: Sequence[str],
    options: PreprocessOptions,
    shard: Shard | None,
    tokenizer: Tokenizer,
) -> dict:
    """Return the `made_from` of the record; of each file its name, bytes, and time of change in nanoseconds."""
    inputs = [
        [path, size_of(path), os.stat(path).st_mtime_ns if os.path.exists(path) else 0]
        for path in paths
    ]
    return {
        "inputs": inputs,
        "shard": list(shard or (0, 1)),
        "keys": list(options.json_keys),
        "append_eod": options.append_eod,
        "skip_bad_lines": options.skip_bad_lines,
        "sentences": options.sentences.fingerprint if options.sentences else None,
        "tokenizer": tokenizer.fingerprint,
        **({"text": asdict(options.cut)} if any(map(is_plain_text, paths)) else {}),
        **({"chat": options.chat.fingerprint} if options.chat else {}),
    }


def _blocks(
    paths: Sequence[str], options: PreprocessOptions, shard: Shard
) -> Iterator[TextBlock]:
    """Yield the blocks of text of a shard, in the order of the input."""
    # A conversation is a whole record.
    keys = () if options.chat else options.json_keys
    for piece in slices_of_shard(paths, keys, *shard, cut=options.cut):
        yield from read_blocks(
            piece.path, keys=keys, start=piece.start, stop=piece.stop, cut=options.cut
        )


def _write(
    encoded: Encoded,
    writers: Sequence[IndexedWriter],
    sums: Sequence[PieceSums],
    written: Written,
    skip_bad_lines: bool,
) -> None:
    """Write a block to the corpus of each key, and add its counts to `written`."""
    if encoded.bad and not skip_bad_lines:
        raise DataError(
            f"{encoded.bad[0]}. Nothing was written. Correct it, or leave out such lines, "
            "rows and documents of plain text with --skip-bad-lines."
        )
    add_doubts(written.doubts, encoded.doubts)
    written.num_bad += len(encoded.bad)
    written.bad += encoded.bad[: 10 - len(written.bad)]
    for writer, each, (tokens, lengths, sequences) in zip(
        writers, sums, encoded.columns
    ):
        try:
            writer.add_documents(tokens, lengths, sequences)
        except OSError as e:
            raise DataError(
                f"cannot write {writer.bin_path}: {e.strerror}. Nothing was kept; free some "
                "space, or choose another --output-prefix."
            ) from None
        each.update(tokens.view(np.uint8).data)
        written.tokens += len(tokens)
    written.documents += len(encoded.columns[0][2])


def encode_block(
    block: TextBlock,
    tokenizer: Tokenizer,
    *,
    options: PreprocessOptions,
    eod: int | None,
    dtype: np.dtype,
) -> Encoded:
    """Tokenize a block.  eod: id to append to each document, or None.  Raises DataError naming the block."""
    if options.chat is not None:
        chats = encode_chats(block, tokenizer, options.chat, eod, options.preference)
        column = (chats.ids.astype(dtype), chats.lengths, chats.sequences)
        return Encoded(
            [column],
            chats.bad,
            block.path,
            block.position,
            chats.mask,
            chats.doubts,
        )
    texts, bad = texts_of(block, options.json_keys, options.sentences is not None)
    try:
        columns = [
            _column(column, tokenizer, eod, dtype, options.sentences)
            for column in texts
        ]
    except DataError as error:
        raise DataError(f"{place_of(block)}: {error} Nothing was written.") from None
    return Encoded(columns, bad, block.path, block.position)


def _column(
    texts: list,
    tokenizer: Tokenizer,
    eod: int | None,
    dtype: np.dtype,
    sentences: Splitter | None,
) -> Column:
    """Encode the texts of a key. Sequences without tokens are left out; such a document has no end, as in Megatron."""
    counts = np.ones(len(texts), np.int64)
    if sentences is not None:
        rows = [
            text if isinstance(text, list) else sentences.split(text) for text in texts
        ]
        counts = np.array([len(row) for row in rows], np.int64)
        texts = [sentence for row in rows for sentence in row]
    ids, lengths = arrays_of(tokenizer, texts)
    # A document may have several sequences, of which those without tokens are left out.
    document = np.repeat(np.arange(len(counts)), counts)[lengths > 0]
    lengths = lengths[lengths > 0]
    if eod is not None:
        # The end of a document follows its last sequence.
        last = np.flatnonzero(np.diff(document, append=len(counts)))
        ids = np.insert(ids, np.cumsum(lengths)[last], eod)
        lengths[last] += 1
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(dtype).max:
        raise DataError(
            f"the tokenizer gave ids from {ids.min()} to {ids.max()}, which do not fit {dtype}, "
            "the type for its vocabulary size."
        )
    return ids.astype(dtype), lengths, np.bincount(document, minlength=len(counts))


def _encoded(
    blocks: Iterable[TextBlock],
    encode: partial,
    make_tokenizer: MakeTokenizer,
    tokenizer: Tokenizer,
    workers: int,
) -> Iterator[Encoded]:
    if workers <= 1:
        yield from (encode(block, tokenizer) for block in blocks)
        return
    # "spawn": a forked copy of a process with threads, which the tokenizers library starts, may deadlock.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        _start_worker,
        (make_tokenizer, os.getpid()),
    )
    try:
        pending: deque[Future[Encoded]] = deque()
        for block in blocks:
            pending.append(pool.submit(_encode_in_worker, encode, block))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps because memory ran out. Nothing was written. "
            "Use fewer --workers."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(make_tokenizer: MakeTokenizer, parent: int) -> None:
    global _tokenizer
    end_with_parent(parent)
    _tokenizer = make_tokenizer()


def _encode_in_worker(encode: partial, block: TextBlock) -> Encoded:
    return encode(block, _tokenizer)


def end_with_parent(parent: int) -> None:
    """End this process, without cleaning up, within about a second after its parent was killed.

    parent: process id of the parent, which may have ended before this process begins.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
