"""The cache of index maps: damaged bytes are noticed when it is loaded, and mended; what cannot be kept says
why."""

import logging
import os
import random

import numpy as np
import pytest

from megatron_ds.data.loading import cache
from megatron_ds.data.loading.cache import cached_arrays

pytestmark = pytest.mark.plan

ARRAYS = {
    "order": np.random.RandomState(7).permutation(5000).astype(np.int32),
    "starts": np.arange(600).reshape(-1, 2),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog):
    monkeypatch.setattr(cache, "_warned", set())
    caplog.set_level(logging.INFO)


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """Entries that are verified at each load; and those that are verified once, of several blocks."""
    if request.param == "large":
        monkeypatch.setattr(cache, "ALWAYS_BYTES", 0)
        monkeypatch.setattr(cache, "BLOCK_BYTES", 3000)
    return request.param


def load(folder, builds=None):
    def build():
        if builds is not None:
            builds.append(1)
        return ARRAYS

    return cached_arrays(folder, "Test", {"of": "this"}, tuple(ARRAYS), build)


def equal(found):
    return found.keys() == ARRAYS.keys() and all(
        np.array_equal(found[name], ARRAYS[name]) for name in ARRAYS
    )


def flip(path, at, bit):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def file_of(folder, end):
    (path,) = (path for path in folder.glob(f"*{end}") if not path.name.startswith("."))
    return path


@pytest.mark.parametrize("end", ["order.npy", "starts.npy", "description.txt"])
def test_a_flipped_bit_anywhere_is_noticed_and_mended_with_one_warning(
    tmp_path, caplog, size, end
):
    load(tmp_path)
    path = file_of(tmp_path, end)
    whole, draw = path.read_bytes(), random.Random(end)
    header = range(min(len(whole), 128))
    for at in [*draw.sample(header, 24), *draw.choices(range(len(whole)), k=24)]:
        flip(path, at, draw.randrange(8))
        caplog.clear()
        builds = []
        assert equal(load(tmp_path, builds)) and len(builds) == 1, at
        assert [record.levelname for record in caplog.records].count("WARNING") == 1
        assert path.read_bytes() == whole
        assert equal(load(tmp_path, builds)) and len(builds) == 1


def test_a_header_that_numpy_cannot_parse_is_mended(tmp_path, caplog):
    load(tmp_path)
    path = file_of(tmp_path, "order.npy")
    # raises TokenError
    header = (
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<i4', 'shape': (5000".ljust(117)
        + b"\n"
    )
    path.write_bytes(header + path.read_bytes()[len(header) :])
    builds = []
    assert equal(load(tmp_path, builds)) and len(builds) == 1


@pytest.mark.parametrize("change", ["truncate", "grow", "empty", "remove"])
def test_a_file_of_another_size_is_written_again(tmp_path, size, change):
    load(tmp_path)
    path, builds = file_of(tmp_path, "order.npy"), []
    if change == "remove":
        path.unlink()
    else:
        os.truncate(
            path,
            {
                "truncate": path.stat().st_size - 8,
                "grow": path.stat().st_size + 8,
                "empty": 0,
            }[change],
        )
    assert (
        equal(load(tmp_path, builds))
        and equal(load(tmp_path, builds))
        and len(builds) == 1
    )


def test_a_large_entry_is_read_once_for_all_processes_and_again_when_a_file_was_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(cache, "ALWAYS_BYTES", 0)
    read, sums_of = [], cache.sums_of
    load(tmp_path)
    monkeypatch.setattr(
        cache, "sums_of", lambda path: read.append(path.name) or sums_of(path)
    )
    assert equal(load(tmp_path)) and equal(load(tmp_path)) and not read
    path = file_of(tmp_path, "order.npy")
    path.write_bytes(
        path.read_bytes()
    )  # the same bytes: nothing to mend, but that has to be seen
    builds = []
    assert equal(load(tmp_path, builds)) and not builds and len(read) >= 2
    read.clear()
    assert equal(load(tmp_path, builds)) and not builds and not read
    state = path.stat()
    flip(path, 3000, 1)
    os.utime(
        path, ns=(state.st_atime_ns, state.st_mtime_ns)
    )  # as a copy that keeps times would
    assert equal(load(tmp_path, builds)) and len(builds) == 1


def test_a_small_entry_is_verified_by_each_process(tmp_path):
    load(tmp_path)
    path, builds = file_of(tmp_path, "order.npy"), []
    state = path.stat()
    flip(path, 3000, 1)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert equal(load(tmp_path, builds)) and len(builds) == 1
    assert not list(tmp_path.glob(".*-verified"))


def test_an_entry_of_an_earlier_version_gets_checksums(tmp_path, caplog):
    load(tmp_path)
    path, builds = file_of(tmp_path, "description.txt"), []
    path.write_text(path.read_text().partition("\n}\n")[0] + "\n}")
    assert (
        equal(load(tmp_path, builds))
        and equal(load(tmp_path, builds))
        and len(builds) == 1
    )
    assert "without checksums" in caplog.text and "checksums" in path.read_text()


def test_a_full_disk_is_reported_with_its_reason_and_the_bytes(
    tmp_path, caplog, monkeypatch
):
    def save(file, array):
        raise OSError(
            f"{array.size} requested and 0 written"
        )  # numpy's, which has no errno

    monkeypatch.setattr(np, "save", save)
    assert equal(load(tmp_path)) and equal(load(tmp_path))
    (told,) = (
        record.message for record in caplog.records if record.levelname == "WARNING"
    )
    assert (
        "(5000 requested and 0 written; they take 0.0 MiB, and " in told
        and "MiB are free)" in told
        and "None" not in told
    )
