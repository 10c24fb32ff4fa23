"""The places of a process: what another one reads of them, also after SIGKILL, and in the middle of a write."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ds.host import places
from megatron_ds.host.place_file import (
    ENTRY,
    MOST_WORDS,
    NONE,
    RING,
    RING_START,
    DeviceEntry,
    PlaceWriter,
    is_record_written,
    read_places,
    request_record,
)
from megatron_ds.host.place_words import PROGRAM

pytestmark = pytest.mark.plan


@pytest.fixture
def path(tmp_path):
    return tmp_path / "places"


def test_what_is_written_is_read(path):
    writer = PlaceWriter(path, {"rank": 3})
    writer.step(7)
    writer.collective("all_reduce", "dp")
    writer.instruction("B", 2, 5)
    writer.wait(places.FOR_RANKS)
    read = read_places(path)
    assert read.rank == {"rank": 3} and read.is_waiting
    newest = read.places[-1]
    assert (newest.step, newest.phase) == (7, places.TRAINING)
    assert (newest.instruction, newest.stage, newest.microbatch) == ("B", 2, 5)
    assert (newest.collective, newest.collectives) == ("all_reduce over dp", 1)
    times = [place.nanoseconds for place in read.places]
    assert times == sorted(times)


def test_the_last_thousand_are_kept(path):
    writer = PlaceWriter(path, {})
    for microbatch in range(2500):
        writer.instruction("F", 0, microbatch)
    kept = read_places(path).places
    assert [place.microbatch for place in kept] == list(range(2500 - RING, 2500))
    assert read_places(path, newest_only=True).places == kept[-1:]


def test_a_torn_entry_is_left_out(path):
    writer = PlaceWriter(path, {})
    for microbatch in range(3):
        writer.instruction("F", 0, microbatch)
    number = read_places(path).places[-1].number
    with path.open("r+b") as file:  # its first half is of the next entry
        file.seek(RING_START + number % RING * ENTRY.size)
        file.write((number + RING).to_bytes(8, "little"))
    assert read_places(path).places[-1].microbatch == 1


def test_a_phase_ends_with_its_context(path, monkeypatch):
    monkeypatch.setattr(places, "_writer", [PlaceWriter(path, {})])
    with places.phase(places.SAVING):
        assert read_places(path).places[-1].phase == places.SAVING
        with places.WAITING:
            assert read_places(path).is_waiting
    read = read_places(path)
    assert read.places[-1].phase == PROGRAM and not read.is_waiting


def test_more_words_than_fit_do_no_harm(path):
    writer = PlaceWriter(path, {})
    for i in range(1000):
        writer.collective("all_reduce", f"axes-{i}")
    newest = read_places(path).places[-1]
    assert newest.collectives == 1000
    assert newest.collective.startswith("all_reduce over axes-")


def test_a_phase_that_does_not_fit_in_the_table_is_the_one_before_the_next(path):
    writer = PlaceWriter(path, {})
    for i in range(MOST_WORDS):
        writer.collective("sum", f"{i}")
    writer.phase(places.SAVING)
    assert writer.phase(places.TRAINING) == places.SAVING


def test_places_survive_sigkill(path):
    text = (
        "import os, signal; from megatron_ds.host.places import *\n"
        f"open_places({{PLACES_FILE: {str(path)!r}}}, 1)\n"
        "writer().instruction('F', 0, 4)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", text]).returncode == -signal.SIGKILL
    read = read_places(path)
    assert read.rank["rank"] == 1 and read.rank["pid"] != os.getpid()
    assert read.places[-1].microbatch == 4


def test_without_the_variable_nothing_is_written():
    places.open_places({}, 0)
    assert places.writer() is None
    assert read_places(Path("/nonexistent")) is None


def test_the_place_of_a_device_and_a_request_for_the_record_pass_through_the_file(path):
    writer = PlaceWriter(path, {"rank": 3})
    assert read_places(path).device is None and writer.rank == 3
    now = time.monotonic_ns()
    entry = DeviceEntry(now, now - 5, 7, 3, 9, 1 << 31, "F", 2, NONE)
    writer.device(entry)
    assert read_places(path).device == entry
    # a rank without a record is not waited for
    assert not request_record(path) and not writer.is_record_wanted()
    writer.answer_requests()
    assert request_record(path) and writer.is_record_wanted()
    assert not is_record_written(path)
    writer.record_is_written()
    assert is_record_written(path) and not writer.is_record_wanted()
    assert read_places(path).device == entry
