"""Files written and read without the page cache hold what a plain file holds."""

import errno
import os
from contextlib import suppress

import pytest
import torch

from megatron_ds.host import direct_file
from megatron_ds.host.direct_file import DirectFile, read_range

pytestmark = pytest.mark.plan

BLOCK = 4096 * 4
WRITES = [
    1,
    BLOCK - 1,
    3 * BLOCK + 5,
    0,
    4096,
    2 * BLOCK,
    77,
]  # bytes, one after the other


def refuse(monkeypatch, of):
    """os.open, or os.pwrite and os.preadv, refuse what is direct, as file systems without it do."""
    real, direct, flag = os.open, set(), direct_file.O_DIRECT

    def opened(path, flags, *others):
        if flags & flag and of == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real(path, flags, *others)
        (direct.add if flags & flag else direct.discard)(fd)
        return fd

    def guarded(function):
        def transfer(fd, *others):
            if fd in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return function(fd, *others)

        return transfer

    monkeypatch.setattr(os, "open", opened)
    if of == "transfer":
        monkeypatch.setattr(os, "pwrite", guarded(os.pwrite))
        monkeypatch.setattr(os, "preadv", guarded(os.preadv))


@pytest.mark.parametrize("refused", [None, "open", "transfer"])
@pytest.mark.parametrize("flushes", [False, True])
def test_a_file_has_the_bytes_that_were_written(
    refused, flushes, tmp_path, monkeypatch
):
    monkeypatch.setattr(direct_file, "BLOCK", BLOCK)
    monkeypatch.setattr(direct_file, "LEAST_DIRECT", 1)
    if refused:
        refuse(monkeypatch, refused)
    content = os.urandom(sum(WRITES))
    with DirectFile(tmp_path / "file") as file:
        at = 0
        for count in WRITES:
            file.write(content[at : at + count])
            at += count
            if flushes:
                file.flush()
                assert (tmp_path / "file").read_bytes() == content[:at]
        assert file.tell() == at
    assert (tmp_path / "file").read_bytes() == content
    for offset, length in [
        (0, len(content)),
        (1, 9),
        (4095, 2 * BLOCK + 3),
        (len(content) - 5000, 9999),
        (len(content) - 1, 4096),
        (len(content) + 3, 9),
    ]:
        with open(tmp_path / "file", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(
                file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
            )  # so that it is read directly
        found = read_range(tmp_path / "file", offset, length)
        assert (
            found.dtype == torch.uint8
            and bytes(found.numpy()) == content[offset : offset + length]
        )


def test_an_error_of_a_block_in_the_background_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_file, "BLOCK", BLOCK)

    def full(fd, *others):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", full)
    file.write(bytes(BLOCK))
    with pytest.raises(OSError, match="No space left"):
        file.write(bytes(BLOCK))
    with suppress(OSError):  # the bytes of the last block fit nowhere either
        file.close()
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "missing" / "file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_are_cast_into_the_blocks_wherever_they_begin_and_end(
    dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr(direct_file, "BLOCK", BLOCK)
    monkeypatch.setattr(direct_file, "TILE", 1000)  # elements
    whole = torch.randn(90, 101).mul(50).bfloat16()
    given = [
        whole,
        whole[7:60],
        whole.t(),
        whole[0, 0],
        whole[:0],
        whole[:, 5:9],
        whole,
    ]
    expected = b"".join(
        one.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for one in given
    )
    for start in (0, 3, 64):  # bytes before the first
        with DirectFile(tmp_path / "file") as file:
            file.write(bytes(start))
            for one in given:
                file.write_tensor(one, dtype)
        assert (tmp_path / "file").read_bytes() == bytes(start) + expected


def test_a_range_is_read_through_the_page_cache_only_if_most_of_it_is_there(tmp_path):
    path, size = tmp_path / "file", 64 * 4096
    path.write_bytes(os.urandom(size))
    with open(path, "rb") as file:
        fd = file.fileno()
        os.fsync(fd)
        if not direct_file._is_cached(fd, 0, size):
            pytest.skip("this system does not tell what its page cache holds")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if direct_file._is_cached(fd, 0, size):
            pytest.skip("the file system keeps its pages in memory")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 1, 0)  # one page
        assert not direct_file._is_cached(fd, 0, size) and direct_file._is_cached(
            fd, 0, 4096
        )
