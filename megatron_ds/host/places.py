"""Where a rank is, in a mapped file that is still there after SIGKILL: its step, instruction and collective.

The launcher's agent gives each rank a file (PLACES_FILE). Each instruction of the pipeline and each collective is an
entry of a ring in it, so that the newest one is the place of the rank, and the others are what it did before. Without
the variable nothing is written.

    | 4096 bytes: JSON of the rank                                  | header
    | 4096 bytes: words, a line each; entries have their numbers    |
    | 64 bytes: the first is 1 while the rank waits for others      |
    | RING entries of 48 bytes                                      |

A write takes no lock. The number of an entry is written at both of its ends: where they differ, the process was ended
in the middle, and the entry before is the newest.
"""

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import platform
import signal
import struct
import sys
import time
from collections.abc import Hashable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)
PLACES_FILE = "MEGATRON_DS_PLACES"
STACKS = signal.SIGQUIT
"""The signal at which a rank with a file of places prints the stacks of its threads."""

RING = 1000
NONE = -1  # no micro-batch, no stage
HEADER_BYTES = 4096
WORD_BYTES = 4096
WORDS_START = HEADER_BYTES
FLAGS_START = WORDS_START + WORD_BYTES
RING_START = FLAGS_START + 64
MOST_WORDS = 200
# number, nanoseconds, step, collective number, micro-batch, stage, phase, instruction, collective, -, number
ENTRY = struct.Struct("<QqqIihBBBxxxQ")
ENDS = struct.Struct("<Q32xQ")  # the two numbers of an entry
BYTES = RING_START + RING * ENTRY.size

# Phases. A rank may take long in all but the first two, and what a program around an engine does is not known.
TRAINING = "training"
EVALUATING = "evaluating"
STARTING = "starting"
READING = "reading data"
SAVING = "saving"
ENDING = "ending"
PROGRAM = "program"
QUICK = (TRAINING, EVALUATING)


class PlaceEntry(NamedTuple):
    """One entry of a rank.

    number       counts all entries from 1 on
    nanoseconds  of CLOCK_MONOTONIC, which all processes of a host share
    step         steps that are complete
    instruction  of the pipeline, "" for none; with its stage and micro-batch, which may be NONE
    collective   the newest one, "" for none, and how many there were
    """

    number: int
    nanoseconds: int
    step: int
    phase: str
    instruction: str
    stage: int
    microbatch: int
    collective: str
    collectives: int


@dataclass(frozen=True)
class PlacesRead:
    """What a file holds. rank: values of the header; places: oldest first; is_waiting: for other ranks"""

    rank: dict
    places: list[PlaceEntry]
    is_waiting: bool


class PlaceWriter:
    """Writes the places of this process. rank: values for the header. Raises OSError."""

    def __init__(self, path: Path, rank: dict):
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            # memory that is missing is an error now, not a signal at a later write
            os.posix_fallocate(file.fileno(), 0, BYTES)
            self._map = mmap.mmap(file.fileno(), BYTES)
        header = json.dumps(rank).encode()[: HEADER_BYTES - 1]
        self._map[: len(header)] = header
        self._words: dict[Hashable, int] = {}
        self._words_end = WORDS_START
        self._number = 0
        # what the next entry has
        self._step = 0
        self._phase = self._word(PROGRAM)
        self._instruction = self._word("")
        self._stage = NONE
        self._microbatch = NONE
        self._collective = self._instruction
        self._collectives = 0
        self._write()

    def phase(self, name: str) -> str:
        """Enter a phase; returns the one before."""
        before = list(self._words)[self._phase]
        self._phase = self._word(name)
        self._write()
        return before

    def step(self, done: int, phase: str = TRAINING) -> None:
        """done: steps that are complete; phase: of what follows"""
        self._step = done
        self._phase = self._word(phase)
        self._instruction = self._word("")
        self._stage = NONE
        self._microbatch = NONE
        self._write()

    def instruction(self, op: str, stage: int, microbatch: int | None) -> None:
        """An instruction of the pipeline begins."""
        word = self._words.get(op)
        self._instruction = self._word(op) if word is None else word
        self._stage = stage
        self._microbatch = NONE if microbatch is None else microbatch
        self._write()

    def collective(self, operation: str, axes: str) -> None:
        """A collective begins."""
        word = self._words.get((operation, axes))
        self._collective = (
            self._word((operation, axes), f"{operation} over {axes}")
            if word is None
            else word
        )
        self._collectives += 1
        self._write()

    def wait(self, is_waiting: bool) -> None:
        """Whether this rank waits for others from now on."""
        self._map[FLAGS_START] = is_waiting

    # One call for each instruction and collective: less than a microsecond.
    def _write(self) -> None:
        self._number = number = self._number + 1
        ENTRY.pack_into(
            self._map,
            RING_START + number % RING * ENTRY.size,
            number,
            time.monotonic_ns(),
            self._step,
            self._collectives,
            self._microbatch,
            self._stage,
            self._phase,
            self._instruction,
            self._collective,
            number,
        )

    def _word(self, key: Hashable, text: str | None = None) -> int:
        """The number of a word; a new one is written to the table. The last number stands for all that do not fit."""
        found = self._words.get(key)
        if found is not None:
            return found
        line = f"{key if text is None else text}\n".encode()
        end = self._words_end + len(line)
        is_full = len(self._words) == MOST_WORDS
        if is_full or end > FLAGS_START:
            return len(self._words) - 1
        self._map[self._words_end : end] = line
        self._words_end = end
        self._words[key] = len(self._words)
        return self._words[key]


def read_places(path: Path, newest_only: bool = False) -> PlacesRead | None:
    """What a rank has written; None before its first entry is complete."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < BYTES:
        return None
    ends = enumerate(ENDS.iter_unpack(data[RING_START:]))
    found = sorted((first, at) for at, (first, last) in ends if first and first == last)
    if not found:
        return None
    rank = json.loads(data[:HEADER_BYTES].rstrip(b"\0") or b"{}")
    words = data[WORDS_START:FLAGS_START].rstrip(b"\0").decode().split("\n")
    places = [
        _place(ENTRY.unpack_from(data, RING_START + at * ENTRY.size), words)
        for _, at in (found[-1:] if newest_only else found)
    ]
    return PlacesRead(rank, places, bool(data[FLAGS_START]))


def _place(values: tuple, words: list[str]) -> PlaceEntry:
    number, nanoseconds, step, collectives, microbatch, stage, *named, _ = values
    phase, instruction, collective = (words[word] for word in named)
    return PlaceEntry(
        number=number,
        nanoseconds=nanoseconds,
        step=step,
        phase=phase,
        instruction=instruction,
        stage=stage,
        microbatch=microbatch,
        collective=collective,
        collectives=collectives,
    )


# ------------------------------------------------------------------ of this process
_writer: list[PlaceWriter] = []


def open_places(environ: MutableMapping[str, str], rank: int) -> None:
    """From now on the places of this process are written, if the launcher gave it a file. Stacks are then printed
    at the signal STACKS. A file is for one process: its children get none."""
    path = environ.pop(PLACES_FILE, "")
    if not path or _writer:
        return
    values = {"rank": rank, "host": platform.node(), "pid": os.getpid()}
    try:
        _writer.append(PlaceWriter(Path(path), values))
    except OSError as error:
        logger.warning(
            "%s cannot be written, so this rank is not watched: %s", path, error
        )
        return
    with contextlib.suppress(ValueError, RuntimeError, OSError):
        faulthandler.register(STACKS, file=sys.__stderr__, all_threads=True)


def writer() -> PlaceWriter | None:
    """What writes the places of this process; None where they are not watched."""
    return _writer[0] if _writer else None


class _Waiting:
    """A context in which this rank waits for other ranks. The thread that trains enters it, no other one."""

    __slots__ = ("nanoseconds", "_since")

    def __init__(self):
        self.nanoseconds = 0
        self._since = 0

    def __enter__(self) -> None:
        if _writer:
            _writer[0].wait(True)
        self._since = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.nanoseconds += time.perf_counter_ns() - self._since
        if _writer:
            _writer[0].wait(False)


WAITING = _Waiting()


def waited_seconds() -> float:
    """How long this process has waited for other ranks since it began."""
    return WAITING.nanoseconds / 1e9


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this process is in a phase."""
    if not _writer:
        yield
        return
    before = _writer[0].phase(name)
    try:
        yield
    finally:
        _writer[0].phase(before)
