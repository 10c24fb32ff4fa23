"""Archives of chunks are those of torch.save, without its copies; checksums are zlib's."""

import io
import itertools
import os
import pickle
import re
import zipfile
import zlib

import pytest
import torch

from megatron_ds.checkpoint import chunk_archive
from megatron_ds.checkpoint.chunk_archive import (
    ChecksummedFile,
    read_archive,
    write_archive,
)
from megatron_ds.host import checksum, reused_pages
from megatron_ds.host.checksum import crc32, crc32_of_rest
from megatron_ds.host.reused_pages import uninitialized

pytestmark = pytest.mark.plan

LENGTHS = [
    0,
    1,
    15,
    16,
    63,
    64,
    65,
    127,
    129,
    1023,
    1024,
    1279,
    1280,
    1281,
    4095,
    4096,
    70_001,
]


# ---- Checksums.


def test_every_way_to_compute_a_checksum_gives_that_of_zlib():
    compiled = pytest.importorskip(
        "megatron_ds._crc32", reason="installed without a compiler"
    )
    content = os.urandom(max(LENGTHS) + 3)
    for way, length, start in itertools.product(
        range(len(compiled.WAYS)), LENGTHS, (0, 3)
    ):
        part = memoryview(content)[start : start + length]
        for value in (0, 1, 0xFFFFFFFF, 0x12345678):
            expected = zlib.crc32(part, value)
            assert compiled.crc32(part, value, way) == crc32(part, value) == expected, (
                way,
                length,
                start,
            )
    with pytest.raises(ValueError, match="does not have that way"):
        compiled.crc32(b"", 0, len(compiled.WAYS))


def test_the_checksum_of_a_part_follows_from_those_of_the_file():
    content = os.urandom(9_999)
    for border in (0, 1, 777, 9_998, 9_999):
        before, rest = content[:border], content[border:]
        assert crc32_of_rest(
            zlib.crc32(before), zlib.crc32(content), len(rest)
        ) == zlib.crc32(rest)


def test_without_the_extension_checksums_are_the_same(monkeypatch):
    content = os.urandom(2 * checksum.SHORT)
    expected = crc32(content, 5)
    monkeypatch.setattr(checksum, "load_compiled", lambda *about: None)
    monkeypatch.setattr(checksum, "_compiled", checksum._compiled.__wrapped__)
    assert crc32(content, 5) == expected == zlib.crc32(content, 5)


# ---- Archives.


def tensors():
    whole = torch.randn(70, 33)
    return {
        "contiguous": whole,
        "rows of a larger one": whole[3:41],
        "columns": whole[:, 2:9],
        "transposed": whole.t(),
        "numbers": torch.arange(999),
        "bf16": whole.bfloat16(),
        "flags": whole > 0,
        "one element": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def archive_of(values, dtype, folder):
    with ChecksummedFile(folder / "file") as file:
        write_archive(file, values, dtype)
        file.flush()
        assert file.crc32 == zlib.crc32((folder / "file").read_bytes())
    return (folder / "file").read_bytes()


def saved(values) -> bytes:
    content = io.BytesIO()
    torch.save(values, content)
    return content.getvalue()


def without_ids(content: bytes) -> bytes:
    """Without the record that torch makes of all checksums, and the checksum of that record."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [record] = [
            one
            for one in archive.infolist()
            if one.filename.endswith("serialization_id")
        ]
        content = content.replace(archive.read(record), b"")
    return content.replace(record.CRC.to_bytes(4, "little"), b"")


@pytest.mark.parametrize("least", [1, 2**20], ids=["without copies", "by torch"])
@pytest.mark.parametrize("name", tensors())
def test_an_archive_is_that_of_torch_and_is_read_back(
    name, least, tmp_path, monkeypatch
):
    monkeypatch.setattr(chunk_archive, "LEAST", least)
    values = tensors()[name]
    content = archive_of(values, values.dtype, tmp_path)
    assert without_ids(content) == without_ids(saved(values.contiguous().clone()))
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    for found in (
        torch.load(io.BytesIO(content), weights_only=True),
        read_archive(torch.frombuffer(bytearray(content), dtype=torch.uint8), True),
    ):
        assert found.dtype == values.dtype and torch.equal(found, values)


def test_values_are_cast_while_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_archive, "LEAST", 1)
    values = torch.randn(40, 3000).bfloat16()  # several tiles
    content = archive_of(values, torch.float32, tmp_path)
    assert without_ids(content) == without_ids(saved(values.float()))


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_a_large_tensor_is_a_view_of_what_was_read_or_a_copy_where_it_is_not_aligned(
    shift, monkeypatch
):
    monkeypatch.setattr(chunk_archive, "LEAST", 1)
    values = torch.randn(500)
    content = torch.frombuffer(
        bytearray(shift) + bytearray(saved(values)), dtype=torch.uint8
    )
    found = read_archive(content[shift:], True)
    assert torch.equal(found, values)
    assert (
        found.untyped_storage().data_ptr() == content.untyped_storage().data_ptr()
    ) == (shift != 1)


class Said:
    """Pickled, it is a tensor of a storage with `numel` elements, of which the record may hold fewer."""

    def __init__(self, numel, size):
        self.numel, self.size = numel, size


def forged(numel, size, record: bytes) -> torch.Tensor:
    """An archive whose pickle has other sizes than its record."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return (
                ("storage", torch.FloatStorage, "0", "cpu", numel)
                if obj == "values"
                else None
            )

        def reducer_override(self, obj):
            if isinstance(obj, Said):
                return torch._utils._rebuild_tensor_v2, (
                    "values",
                    0,
                    (size,),
                    (1,),
                    False,
                    {},
                )
            return NotImplemented

    pickled, content = io.BytesIO(), io.BytesIO()
    Pickler(pickled, protocol=2).dump(Said(numel, size))
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in {
            "data.pkl": pickled.getvalue(),
            "byteorder": b"little",
            "version": b"3\n",
            "data/0": record,
        }.items():
            archive.writestr(f"archive/{name}", data)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def test_sizes_of_the_pickle_that_differ_from_the_record_are_refused(monkeypatch):
    monkeypatch.setattr(chunk_archive, "LEAST", 1)
    values = torch.randn(300)
    assert torch.equal(
        read_archive(forged(300, 300, values.numpy().tobytes()), False), values
    )
    for numel, size in (
        (2**30, 2**30),
        (2**30, 300),
        (2**55, 2**55),
        (301, 301),
        (10, 301),
        (300, 2**40),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            read_archive(forged(numel, size, values.numpy().tobytes()), False)


def test_a_record_that_ends_before_its_size_is_refused(monkeypatch):
    monkeypatch.setattr(chunk_archive, "LEAST", 1)
    content = bytearray(saved(torch.randn(300)))
    header = content.index(b"archive/data/0") - 30
    content[header + 28 : header + 30] = b"\xff\xff"  # length of the extra field
    with pytest.raises(
        (ValueError, RuntimeError), match=re.compile("ends after|failed|offset", re.I)
    ):
        read_archive(torch.frombuffer(content, dtype=torch.uint8), False)


# ---- Memory that is used again.


def test_memory_of_a_dropped_tensor_serves_the_next_one_and_no_other():
    shape, size = (1100, 1000), 1_100_000  # 4.4 MB
    with reused_pages.reused_pages():
        first, second = (
            uninitialized(shape, torch.float32),
            uninitialized((size,), torch.float32),
        )
        places = {first.data_ptr(), second.data_ptr()}
        assert len(places) == 2
        view = first.view(-1)[5:].numpy()
        del first
        other = uninitialized(shape, torch.float32)
        assert other.data_ptr() not in places  # a view is left
        view[:] = 7
        place = view.ctypes.data - 5 * 4
        del view
        assert (
            uninitialized((3 * size,), torch.float32).data_ptr() != place
        )  # it is too small
        third = uninitialized((size - 9,), torch.float32)
        assert third.data_ptr() == place and third[100] == 7
    third.fill_(1)
    assert third.sum() == size - 9 and reused_pages._shared.pool is None
