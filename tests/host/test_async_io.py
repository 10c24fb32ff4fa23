"""Both engines of disk access against plain reads and writes of Python's os module."""

import ctypes
import errno
import gc
import logging
import multiprocessing
import os
import resource
import sys
import threading

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.host import async_io
from megatron_ds.host.async_io import ThreadIO, UringIO, make_io
from megatron_ds.host.large_pages import aligned_empty

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(sys.platform != "linux", reason="disks are used on Linux only"),
]
PAGE = 4096
BLOCK = 2 * PAGE
DEPTH = 4


@pytest.fixture(params=["threads", "io_uring"])
def io(request):
    try:
        engine = (ThreadIO if request.param == "threads" else UringIO)(DEPTH, BLOCK)
    except OSError as reason:
        pytest.skip(reason.strerror)
    yield engine
    engine.close()


@pytest.fixture
def uring():
    try:
        return UringIO(DEPTH, BLOCK)
    except OSError as reason:
        pytest.skip(reason.strerror)


@pytest.fixture(params=["direct", "buffered"])
def fd(request, tmp_path):
    flags = os.O_DIRECT if request.param == "direct" else 0
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | flags)
        os.pwritev(fd, [aligned_empty(PAGE, torch.uint8).numpy()], 0)
    except OSError as reason:
        pytest.skip(f"no direct access in {tmp_path}: {reason}")
    yield fd
    os.close(fd)


def noise(nbytes, seed):
    """At a whole page."""
    return aligned_empty(nbytes, torch.uint8).copy_(
        torch.randint(
            256,
            (nbytes,),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
    )


def content(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("pages", [1, 2, 3, 2 * DEPTH + 1, 50])
def test_bytes_go_where_python_finds_them_and_come_from_where_it_put_them(
    io, fd, tmp_path, pages
):
    out, back, offset = noise(pages * PAGE, pages), noise(pages * PAGE, 0), 3 * PAGE
    io.write(fd, out, offset).wait()
    with open(tmp_path / "file", "r+b") as file:
        file.seek(offset)
        assert file.read() == content(out)
        file.seek(offset)
        file.write(content(out)[::-1])
        file.flush()
        os.fsync(file.fileno())
    io.read(fd, back, offset).wait()
    assert content(back) == content(out)[::-1]


@pytest.mark.parametrize("nbytes", [0, 1, 1001, BLOCK - 1, BLOCK + 1, 5 * BLOCK + 13])
def test_odd_lengths_addresses_and_offsets_are_moved_through_the_page_cache(
    io, tmp_path, nbytes
):
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    out, back = noise(nbytes + 7, 1)[7:], noise(nbytes + 3, 2)[3:]
    io.write(fd, out, 77).wait()
    io.read(fd, back, 77).wait()
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"x" * 77 + content(out) + b"x" * (
        100_000 - 77 - nbytes
    )
    assert torch.equal(out, back)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str
)
def test_every_dtype_and_shape_is_a_stretch_of_bytes(io, fd, dtype):
    values = torch.arange(8 * PAGE).view(4, 2, -1) % 2
    out = (
        aligned_empty(8 * PAGE, dtype)
        .view(4, 2, -1)
        .copy_(values)
        .requires_grad_(dtype.is_floating_point)
    )
    back = aligned_empty(8 * PAGE, dtype).view(4, 2, -1)
    io.write(fd, out, PAGE).wait()
    io.read(fd, back, PAGE).wait()
    assert torch.equal(back, values.to(dtype))


def test_many_transfers_are_in_flight_and_each_lands_in_its_place(io, fd):
    sizes = [1 + i * 7 % 5 for i in range(100)]
    starts = [PAGE * sum(sizes[:i]) for i in range(100)]
    out = [noise(n * PAGE, i) for i, n in enumerate(sizes)]
    back = [aligned_empty(n * PAGE, torch.uint8) for n in sizes]
    for work in [io.write(fd, t, at) for t, at in zip(out, starts)]:
        work.wait()
    for work in reversed([io.read(fd, t, at) for t, at in zip(back, starts)]):
        work.wait()
    assert all(map(torch.equal, out, back))


def test_threads_may_share_an_engine(io, fd):
    wrong = []

    def go(i):
        for round in range(10):
            out, back = (
                noise(3 * PAGE, 100 * i + round),
                aligned_empty(3 * PAGE, torch.uint8),
            )
            io.write(fd, out, 3 * PAGE * i).wait()
            io.read(fd, back, 3 * PAGE * i).wait()
            if not torch.equal(out, back):
                wrong.append((i, round))

    threads = [threading.Thread(target=go, args=(i,)) for i in range(5)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_transfer_that_nobody_waits_for_is_made_all_the_same(io, fd, tmp_path):
    for i in range(20):
        io.write(fd, noise(5 * PAGE, i), 5 * PAGE * i)
    io.close()
    assert (tmp_path / "file").read_bytes() == b"".join(
        content(noise(5 * PAGE, i)) for i in range(20)
    )


def test_a_closed_ring_has_no_descriptors_and_still_gives_results(fd):
    gc.collect()  # rings of earlier tests, which would be closed at any time
    before = os.listdir("/proc/self/fd")
    try:
        uring = UringIO(DEPTH, BLOCK)
    except OSError as reason:
        pytest.skip(reason.strerror)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    work = uring.write(fd, noise(PAGE, 0), 0)
    for _ in range(2):
        uring.close()
    assert os.listdir("/proc/self/fd") == before
    work.wait()
    with pytest.raises(ValueError, match="closed"):
        uring.read(fd, noise(PAGE, 0), 0)


def test_a_file_that_ends_too_early_is_an_error_with_the_numbers(io, fd):
    os.ftruncate(fd, 3 * PAGE + 100)
    work = io.read(fd, aligned_empty(5 * PAGE, torch.uint8), PAGE)
    for _ in range(2):  # the same, however often it is waited for
        with pytest.raises(
            OSError,
            match=f"reading 20480 bytes at offset 4096 moved {2 * PAGE + 100}: the file ends "
            "there",
        ):
            work.wait()


def test_an_error_of_the_system_is_told_and_the_engine_goes_on(io, fd, tmp_path):
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(
        OSError, match="writing 40960 bytes at offset 8192 moved 0: Bad file descriptor"
    ) as error:
        io.write(read_only, noise(10 * PAGE, 0), 8192).wait()
    assert error.value.errno == errno.EBADF
    os.close(read_only)
    io.write(fd, noise(PAGE, 0), 0).wait()
    back = aligned_empty(PAGE, torch.uint8)
    io.read(fd, back, 0).wait()
    assert torch.equal(back, noise(PAGE, 0))


def test_a_write_that_the_system_cuts_short_goes_on_until_it_says_why(io, fd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (BLOCK + PAGE, hard)
    )  # in the middle of the second block
    try:
        with pytest.raises(OSError, match="File too large") as error:
            io.write(fd, noise(3 * BLOCK, 0), 0).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert os.fstat(fd).st_size == BLOCK + PAGE


def test_short_transfers_of_threads_go_on(monkeypatch, tmp_path):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: read(fd, [views[0][:1000]], offset)
    )
    monkeypatch.setattr(
        os, "pwritev", lambda fd, views, offset: write(fd, [views[0][:999]], offset)
    )
    io, out, back = ThreadIO(DEPTH, BLOCK), noise(5 * BLOCK, 1), noise(5 * BLOCK, 2)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        io.write(file.fileno(), out, 0).wait()
        io.read(file.fileno(), back, 0).wait()
    assert torch.equal(out, back)
    io.close()


def test_short_transfers_of_the_ring_go_on(uring):
    """A pipe holds less than a block, so that a read gets what is there."""
    into, out_of = os.pipe()
    sent, back = noise(BLOCK, 1), noise(BLOCK, 2)
    work = uring.read(into, back, 0)
    for start in range(0, BLOCK, 1000):
        os.write(out_of, content(sent[start : start + 1000]))
    work.wait()
    os.close(into)
    os.close(out_of)
    assert torch.equal(sent, back)


def test_tensors_that_are_no_stretch_of_cpu_memory_are_refused(io, fd):
    with pytest.raises(ValueError, match="not contiguous"):
        io.read(fd, torch.zeros(4, 4).t(), 0)
    with pytest.raises(ValueError, match="on meta"):
        io.write(fd, torch.zeros(4, device="meta"), 0)


def test_a_forked_child_cannot_use_its_parents_ring_and_makes_its_own(uring):
    def child(answers):
        with pytest.raises(ValueError, match="forked child"):
            uring.read(0, torch.zeros(1), 0)
        UringIO(DEPTH, BLOCK).close()
        answers.put("well")

    assert in_child(child) == "well"


@pytest.mark.parametrize("numel", [0, 1, 1000, 3 << 20])
def test_aligned_memory_begins_at_a_page_and_has_no_more_than_was_asked(numel):
    t = aligned_empty(numel, torch.bfloat16)
    assert t.shape == (numel,) and t.dtype == torch.bfloat16
    assert t.data_ptr() % PAGE == 0 and t.untyped_storage().nbytes() == 2 * numel
    t.fill_(3)
    assert t.float().sum() == 3 * numel


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"block_bytes": 0}, "blocks of 0 bytes"),
        ({"block_bytes": 5000}, "blocks of 5000 bytes.*multiple of 4096"),
        ({"block_bytes": 2 << 30}, "at most 1073741824"),
        ({"queue_depth": 0, "threads": 0}, "^0 blocks"),
        ({"queue_depth": 5000, "threads": 5000}, "5000 blocks .* use 1 to 4096"),
    ],
)
@pytest.mark.parametrize("kind", ["threads", "io_uring"])
def test_impossible_numbers_are_refused_with_the_possible_ones(
    kind, numbers, message, request
):
    if kind == "io_uring":
        request.getfixturevalue("uring")
    with pytest.raises(ConfigError, match=message):
        make_io(kind, **numbers)


def test_auto_takes_io_uring_where_it_works(uring):
    io = make_io("auto", queue_depth=3, block_bytes=PAGE)
    assert isinstance(io, UringIO)
    io.close()


def test_without_the_extension_threads_serve_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "megatron_ds._async_io", None)
    async_io._log_threads.cache_clear()
    with caplog.at_level(logging.INFO):
        engines = [make_io("auto"), make_io("auto")]
    assert all(isinstance(io, ThreadIO) for io in engines)
    assert (
        len(caplog.messages) == 1
        and "runs on threads" in caplog.text
        and "not compiled" in caplog.text
    )
    with pytest.raises(
        ConfigError, match="requested but does not work: io_uring is not compiled"
    ):
        make_io("io_uring")


def test_where_the_kernel_forbids_io_uring_threads_serve_and_the_reason_is_told(uring):
    def child(answers):
        forbid_io_uring()
        async_io._log_threads.cache_clear()
        records = []
        async_io.logger.addHandler(handler := logging.Handler())
        handler.emit = records.append
        answers.put((type(make_io("auto")).__name__, records[0].getMessage()))

    name, message = in_child(child)
    assert name == "ThreadIO"
    assert "the kernel forbids io_uring here" in message


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'aio'.*auto, io_uring, threads"):
        make_io("aio")


def in_child(act):
    """What act puts into its queue, in a forked process."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=act, args=(answers,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return answers.get()


def forbid_io_uring():
    """What containers do: a seccomp filter that answers io_uring_setup, 425 everywhere, with EPERM."""
    load, unless_equal, answer = 0x20, 0x15, 0x06
    allow, eperm = 0x7FFF0000, 0x00050000 | errno.EPERM
    steps = [
        (load, 0, 0, 0),
        (unless_equal, 0, 1, 425),
        (answer, 0, 0, eperm),
        (answer, 0, 0, allow),
    ]

    class Step(ctypes.Structure):
        _fields_ = [
            ("code", ctypes.c_uint16),
            ("yes", ctypes.c_uint8),
            ("no", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        ]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

    program = Program(len(steps), (Step * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0) == 0, (
        os.strerror(ctypes.get_errno())
    )
