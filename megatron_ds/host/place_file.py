"""The file in which a rank writes where it is: `PlaceWriter` and `read_places`.

Each instruction of the pipeline and each collective is an entry of a ring in it, so that the newest one is the place
of the rank, and the others are what it did before.

    | 4096 bytes: JSON of the rank                                  | header
    | 4096 bytes: words, a line each; entries have their numbers    |
    | 64 bytes: for what the rank waits, requests, its device       |
    | RING entries of 48 bytes                                      |

The 64 bytes: 0 holds NOT_WAITING, FOR_RANKS or FOR_DEVICE; 1 a request for the record of collectives (the launcher
writes WANTED, the rank ANSWERED); 2 is 1 in a rank that answers such requests; from 8 on DEVICE, the place of the GPU.

A write takes no lock. The number of an entry is written at both of its ends: where they differ, the process was ended
in the middle, and the entry before is the newest.
"""

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .place_words import NOT_WAITING, PROGRAM, TRAINING

RING = 1000
NONE = -1  # no micro-batch, no stage
HEADER_BYTES = 4096
WORD_BYTES = 4096
WORDS_START = HEADER_BYTES
FLAGS_START = WORDS_START + WORD_BYTES
REQUEST = FLAGS_START + 1
ANSWERS = FLAGS_START + 2
DEVICE_START = FLAGS_START + 8
RING_START = FLAGS_START + 64
MOST_WORDS = 200
# number, nanoseconds, step, collective number, micro-batch, stage, phase, instruction, collective, -, number
ENTRY = struct.Struct("<QqqIihBBBxxxQ")
ENDS = struct.Struct(
    "<Q32xQ"
)  # the number of an entry, which stands at its beginning and at its end
# nanoseconds of the look, and of the last change, step, done, launched, moment, micro-batch, stage, instruction, -, of
# the look
DEVICE = struct.Struct("<QQqIIIihBxQ")
BEHIND_ALL = (1 << 32) - 1  # moment of a device that has done all instructions
# States of a request for the record of collectives.
WANTED = 1
ANSWERED = 2
BYTES = RING_START + RING * ENTRY.size


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


class DeviceEntry(NamedTuple):
    """Where the GPU of a rank is in the instructions of a step.

    looked       nanoseconds of CLOCK_MONOTONIC at the newest look
    since        those of the first look that found it there
    step         complete steps when the instructions were launched
    done         instructions whose work is done, of those `launched`
    moment       time of the instruction in the schedule, the same for all ranks: what waits for an instruction of
                 another rank has a later moment. BEHIND_ALL behind the last one
    instruction  at which it is, "" behind all; with its stage and micro-batch, which may be NONE
    """

    looked: int
    since: int
    step: int
    done: int
    launched: int
    moment: int
    instruction: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class PlacesRead:
    """What a file holds. rank: values of the header; places: oldest first; waits_for: FOR_RANKS, FOR_DEVICE or
    NOT_WAITING; device: where the GPU is, if the rank has one"""

    rank: dict
    places: list[PlaceEntry]
    waits_for: int
    device: DeviceEntry | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks, by way of its device or without it."""
        return self.waits_for != NOT_WAITING


class PlaceWriter:
    """Writes the places of this process. rank: values for the header. Raises OSError."""

    def __init__(self, path: Path, rank: dict):
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            # memory that is missing is an error now, not a signal at a later write
            os.posix_fallocate(file.fileno(), 0, BYTES)
            self._map = mmap.mmap(file.fileno(), BYTES)
        self.rank = int(rank.get("rank", 0))
        header = json.dumps(rank).encode()[: HEADER_BYTES - 1]
        self._map[: len(header)] = header
        self._words: dict[Hashable, int] = {}
        self._phase_name = PROGRAM
        self._words_end = WORDS_START
        self._number = 0
        # values of the next entry
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
        before = self._phase_name
        self._enter(name)
        self._write()
        return before

    def _enter(self, phase: str) -> None:
        self._phase_name = phase
        self._phase = self._word(phase)

    def step(self, done: int, phase: str = TRAINING) -> None:
        """Write that the steps `done` are complete, and that `phase` follows."""
        self._step = done
        self._enter(phase)
        self._instruction = self._word("")
        self._stage = NONE
        self._microbatch = NONE
        self._write()

    def instruction(self, op: str, stage: int, microbatch: int | None) -> None:
        """Write that an instruction of the pipeline begins."""
        word = self._words.get(op)
        self._instruction = self._word(op) if word is None else word
        self._stage = stage
        self._microbatch = NONE if microbatch is None else microbatch
        self._write()

    def collective(self, operation: str, axes: str) -> None:
        """Write that a collective begins."""
        word = self._words.get((operation, axes))
        self._collective = (
            self._word((operation, axes), f"{operation} over {axes}")
            if word is None
            else word
        )
        self._collectives += 1
        self._write()

    def wait(self, what: int) -> None:
        """Write for what this rank waits from now on: FOR_RANKS, FOR_DEVICE or NOT_WAITING."""
        self._map[FLAGS_START] = what

    def device(self, entry: DeviceEntry) -> None:
        """Write the place of the GPU. One thread calls this."""
        DEVICE.pack_into(
            self._map,
            DEVICE_START,
            entry.looked,
            entry.since,
            entry.step,
            entry.done,
            entry.launched,
            entry.moment,
            entry.microbatch,
            entry.stage,
            self._word(entry.instruction),
            entry.looked,
        )

    @property
    def completed_steps(self) -> int:
        """Return the number of steps that the next entry has as complete."""
        return self._step

    def answer_requests(self) -> None:
        """Write that this rank answers requests for the record of its collectives from now on."""
        self._map[ANSWERS] = 1

    def is_record_wanted(self) -> bool:
        """Return whether the launcher waits for the record of collectives."""
        return self._map[REQUEST] == WANTED

    def record_is_written(self) -> None:
        """Answer the request."""
        self._map[REQUEST] = ANSWERED

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
        """Return the number of a word; a new one is written to the table. All words that do not fit share the last
        number."""
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
    """Return what a rank has written; None before its first entry is complete."""
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
    return PlacesRead(rank, places, data[FLAGS_START], _device(data, words))


def _device(data: bytes, words: list[str]) -> DeviceEntry | None:
    """Return the place of the GPU; None where there is none, or where it is being written."""
    looked, since, step, done, launched, moment, microbatch, stage, word, again = (
        DEVICE.unpack_from(data, DEVICE_START)
    )
    if not looked or looked != again:
        return None
    return DeviceEntry(
        looked=looked,
        since=since,
        step=step,
        done=done,
        launched=launched,
        moment=moment,
        instruction=words[word],
        stage=stage,
        microbatch=microbatch,
    )


def request_record(path: Path) -> bool:
    """Ask the rank of a file to write the record of its collectives; False if it does not answer requests."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.seek(ANSWERS)
        if file.read(1) == b"\1":
            file.seek(REQUEST)
            file.write(bytes([WANTED]))
            return True
    return False


def is_record_written(path: Path) -> bool:
    """Return whether the rank of a file has answered the request."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(REQUEST)
        return file.read(1) == bytes([ANSWERED])
    return False


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
