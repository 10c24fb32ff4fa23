"""Scratch files: what is written one way is read the others, space is reserved, and nothing outlives the
process."""

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch

from megatron_ds.errors import ConfigError, StorageError
from megatron_ds.host import scratch_file
from megatron_ds.host.async_io import ThreadIO, UringIO
from megatron_ds.host.large_pages import aligned_empty
from megatron_ds.host.scratch_file import STRIDE, ScratchFile

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(sys.platform != "linux", reason="disks are used on Linux only"),
]
PAGE = 4096
BLOCK = 2 * PAGE


@pytest.fixture(params=["threads", "io_uring"])
def io(request):
    try:
        engine = (ThreadIO if request.param == "threads" else UringIO)(4, BLOCK)
    except OSError as reason:
        pytest.skip(reason.strerror)
    yield engine
    engine.close()


@pytest.fixture
def threads():
    engine = ThreadIO(4, BLOCK)
    yield engine
    engine.close()


@pytest.fixture(params=["direct", "buffered"])
def file(request, io, tmp_path, caplog):
    file = ScratchFile(tmp_path, io, direct=request.param == "direct")
    if request.param == "direct" and file.direct_fd is None:
        pytest.skip(caplog.text or f"no direct access in {tmp_path}")
    yield file
    file.close()


def noise(nbytes, seed):
    return torch.randint(
        256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def placed(tensor, address=0):
    """The same, so many bytes behind the start of a page."""
    return aligned_empty(len(tensor) + address, torch.uint8)[address:].copy_(tensor)


def on_disk(file, region, nbytes):
    return torch.frombuffer(
        bytearray(os.pread(file.buffered_fd, nbytes, region.offset)), dtype=torch.uint8
    )


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 3 * PAGE, 10 * BLOCK + 5])
@pytest.mark.parametrize("address", [0, 64, 1])
def test_a_region_gives_back_what_it_was_given(file, nbytes, address):
    region, back = file.allocate(nbytes), placed(noise(nbytes, 0), address)
    region.write_from(placed(noise(nbytes, 1), address)).wait()
    assert torch.equal(on_disk(file, region, nbytes), noise(nbytes, 1))
    region.read_into(back).wait()
    assert torch.equal(back, noise(nbytes, 1))


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 3, 3 * PAGE])
@pytest.mark.parametrize("address", [0, 5])
def test_a_short_tensor_leaves_the_rest_of_the_region_and_the_neighbours_alone(
    file, nbytes, address
):
    before, region, after = [file.allocate(3 * PAGE + 7) for _ in range(3)]
    for i, r in enumerate((before, region, after)):
        r.write_from(placed(noise(r.nbytes, i))).wait()
    region.write_from(placed(noise(nbytes, 9), address)).wait()
    assert torch.equal(
        on_disk(file, region, region.nbytes),
        torch.cat([noise(nbytes, 9), noise(region.nbytes, 1)[nbytes:]]),
    )
    for i, r in ((0, before), (2, after)):
        back = placed(noise(r.nbytes, 7))
        r.read_into(back).wait()
        assert torch.equal(back, noise(r.nbytes, i))
    longer = torch.zeros(nbytes + 1, dtype=torch.uint8)
    region.read_into(longer[:nbytes]).wait()
    assert torch.equal(longer[:nbytes], noise(nbytes, 9)) and longer[-1] == 0


def test_map_and_transfers_show_each_other_s_bytes_over_and_over(file):
    """Every way to write, then every way to read, in all orders."""
    n = 5 * BLOCK + 333
    region = file.allocate(n)
    shown = region.map(torch.uint8, n)

    def by_map(x):
        shown.copy_(x)
        region.settle()

    writes = [
        by_map,
        lambda x: shown.copy_(x),
        lambda x: region.write_from(placed(x)).wait(),
        lambda x: region.write_from(placed(x, 3)).wait(),
    ]

    def by_transfer(address):
        back = placed(torch.zeros(n, dtype=torch.uint8), address)
        region.read_into(back).wait()
        return back

    reads = [
        shown.clone,
        lambda: by_transfer(0),
        lambda: by_transfer(3),
        region.map(torch.uint8, n).clone,
    ]
    seed = 0
    for first in writes:
        for second in writes:
            for read in reads:
                for write in (first, second):
                    seed += 1
                    write(noise(n, seed))
                    assert torch.equal(read(), noise(n, seed)), (
                        writes.index(first),
                        writes.index(second),
                        reads.index(read),
                    )


def test_a_map_touched_beside_direct_writes_of_its_neighbours_spoils_none(file):
    """The map's pages come and go while both neighbours are written: see "two ways to one byte"."""
    n = 4 * BLOCK
    left, middle, right = (file.allocate(n) for _ in range(3))
    shown, stop = middle.map(torch.uint8, n), threading.Event()

    def touch():
        value = 0
        while not stop.is_set():
            value += 1
            shown.fill_(value % 256)
            middle.settle()

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        for seed in range(30):
            for work in [
                r.write_from(placed(noise(n, seed + i)))
                for i, r in enumerate((left, right))
            ]:
                work.wait()
            for i, r in enumerate((left, right)):
                back = placed(noise(n, 99))
                r.read_into(back).wait()
                assert torch.equal(back, noise(n, seed + i))
    finally:
        stop.set()
        toucher.join()
    assert left.offset + STRIDE == middle.offset == right.offset - STRIDE


def descriptors_of(file):
    """How many this process has. Others may be closed meanwhile: those of an earlier test's garbage."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(
                os.path.samestat(os.fstat(int(fd)), os.fstat(file.buffered_fd))
            )
    return sum(found)


def test_maps_take_no_descriptors(file):
    before = descriptors_of(file)
    maps = [file.allocate(PAGE).map(torch.float32, 1000) for _ in range(100)]
    assert descriptors_of(file) == before == (1 if file.direct_fd is None else 2)
    for i, shown in enumerate(maps):
        shown.fill_(i)
    assert [shown.sum() for shown in maps] == [1000 * i for i in range(100)]


def test_a_map_that_nobody_holds_is_given_back(file):
    def maps():
        with open("/proc/self/maps") as lines:
            return sum(
                str(os.fstat(file.buffered_fd).st_ino) in line.split() for line in lines
            )

    region = file.allocate(3 * PAGE)
    shown = region.map(torch.uint8, PAGE)
    del region
    assert maps() == 1
    del shown
    assert maps() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_map_has_its_dtype_and_outlives_region_and_file(file, dtype):
    region = file.allocate(1001 * dtype.itemsize)
    shown = region.map(dtype, 1001).copy_(torch.arange(1001))
    region.settle()
    back = aligned_empty(1001, dtype)
    region.read_into(back).wait()
    assert torch.equal(back, torch.arange(1001).to(dtype))
    assert len(region.map(dtype, 0)) == 0
    with pytest.raises(ValueError, match="1002 elements"):
        region.map(dtype, 1002)
    file.close()
    del region
    shown.add_(1)
    assert torch.equal(shown, torch.arange(1001).to(dtype) + 1)


def test_settling_gives_back_the_memory_of_a_map(file):
    def mapped_kb():
        status = open("/proc/self/status").read()
        return sum(
            int(line.split()[1])
            for line in status.splitlines()
            if line.startswith(("RssFile", "RssShmem"))
        )

    region = file.allocate(32 << 20)
    shown = region.map(torch.uint8, 32 << 20)
    before = mapped_kb()
    shown.fill_(1)
    full = mapped_kb()
    region.settle()
    assert full - before > 30_000 and mapped_kb() - before < 2_000
    assert shown.sum(dtype=torch.int64) == 32 << 20


def test_tensors_larger_than_the_region_are_refused(file):
    region = file.allocate(100)
    for act in (region.read_into, region.write_from):
        with pytest.raises(
            ValueError, match="104 bytes does not fit in a region of 100"
        ):
            act(torch.zeros(26))


def test_space_is_reserved_and_the_gaps_between_regions_cost_none(threads, tmp_path):
    file = ScratchFile(tmp_path, threads)
    for _ in range(3):
        file.allocate(1_000_001)
    used = os.fstat(file.buffered_fd).st_blocks * 512
    assert 3_000_003 <= used < 3_300_000
    assert os.fstat(file.buffered_fd).st_size > 2 * STRIDE


@pytest.fixture
def small_disk(tmp_path):
    """A megabyte of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_an_error_with_the_numbers_and_what_was_reserved_stays(
    small_disk, io
):
    file = ScratchFile(small_disk, io)
    region = file.allocate(200_000)
    region.write_from(noise(200_000, 1)).wait()
    with pytest.raises(ConfigError) as error:
        file.allocate(2_000_000)
    for part in (
        str(small_disk),
        "2,002,944 bytes",
        "No space left on device",
        "are free",
        "200,704 bytes",
    ):
        assert part in str(error.value)
    file.allocate(500_000)
    back = torch.empty(200_000, dtype=torch.uint8)
    region.read_into(back).wait()
    assert torch.equal(back, noise(200_000, 1))
    file.close()


def test_a_limit_on_the_size_of_files_is_an_error_of_the_same_kind(threads, tmp_path):
    file = ScratchFile(tmp_path, threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            ConfigError, match="not enough space for 2,097,152 bytes.*File too large"
        ):
            file.allocate(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["a_file", "a_file/inside"])
def test_a_directory_that_is_none_is_refused_by_name(threads, tmp_path, name):
    (tmp_path / "a_file").touch()
    with pytest.raises(
        ConfigError,
        match=f"{tmp_path / name} cannot hold offloaded state: Not a directory",
    ):
        ScratchFile(tmp_path / name, threads)


def test_a_directory_that_is_missing_is_made(threads, tmp_path):
    ScratchFile(tmp_path / "one" / "two", threads).allocate(4096)
    assert list((tmp_path / "one" / "two").iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_refused_by_name(threads, tmp_path):
    me = os.geteuid()
    tmp_path.chmod(0o500)
    if me == 0:
        os.seteuid(65534)  # nothing is forbidden to root
    try:
        with pytest.raises(
            ConfigError,
            match=f"{tmp_path} cannot hold offloaded state: Permission denied",
        ):
            ScratchFile(tmp_path, threads)
    finally:
        os.seteuid(me)
        tmp_path.chmod(0o700)


def refusing(flag, code):
    """os.open on a file system that does not know the flag."""

    def open_(path, flags, *rest, real=os.open, **named):
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **named)

    return open_


def test_a_file_system_without_direct_access_is_used_through_the_cache_and_that_is_said_once(
    threads, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(os, "open", refusing(os.O_DIRECT, 22))
    scratch_file._log_buffered.cache_clear()
    with caplog.at_level(logging.INFO):
        files = [ScratchFile(tmp_path, threads) for _ in range(2)]
    assert [f.direct_fd for f in files] == [None, None]
    assert (
        len(caplog.messages) == 1
        and str(tmp_path) in caplog.text
        and "Invalid argument" in caplog.text
    )


def test_a_file_system_without_nameless_files_still_shows_none(
    threads, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "open", refusing(os.O_TMPFILE, 95))
    file = ScratchFile(tmp_path, threads)
    region, back = file.allocate(10_000), torch.empty(10_000, dtype=torch.uint8)
    assert not os.listdir(tmp_path)
    region.write_from(noise(10_000, 3)).wait()
    region.read_into(back).wait()
    assert torch.equal(back, noise(10_000, 3))


@pytest.mark.parametrize("act", ["read_into", "write_from"])
@pytest.mark.parametrize("address", [0, 1])
def test_a_failing_disk_names_directory_offset_and_sizes(file, tmp_path, act, address):
    file.allocate(1)
    region = file.allocate(3 * BLOCK)
    closed = os.open("/dev/null", os.O_WRONLY if act == "read_into" else os.O_RDONLY)
    for fd in filter(None, (file.buffered_fd, file.direct_fd)):
        os.dup2(closed, fd)
    os.close(closed)
    with pytest.raises(StorageError) as error:
        getattr(region, act)(placed(noise(2 * BLOCK, 0), address)).wait()
    for part in (
        str(tmp_path),
        f"{3 * BLOCK} bytes from offset {STRIDE}",
        f"ing {2 * BLOCK} bytes",
        "Bad file descriptor",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("address", [0, 1])
def test_a_file_cut_off_under_a_region_is_an_error(file, address):
    region = file.allocate(3 * BLOCK)
    os.ftruncate(file.buffered_fd, BLOCK)
    with pytest.raises(StorageError, match="reading .* the file ends there"):
        region.read_into(placed(noise(3 * BLOCK - 1, 0), address)).wait()


def test_a_killed_process_leaves_nothing_in_the_directory(tmp_path):
    def child(answers):
        file = ScratchFile(tmp_path, ThreadIO(2, BLOCK))
        region = file.allocate(1 << 20)
        region.map(torch.uint8, 1 << 20).fill_(7)
        region.write_from(placed(noise(BLOCK, 0)))
        answers.put(os.fstat(file.buffered_fd).st_blocks * 512)
        signal.pause()

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    assert answers.get() >= 1 << 20
    assert not os.listdir(tmp_path)
    process.kill()
    process.join()
    assert not os.listdir(tmp_path)
