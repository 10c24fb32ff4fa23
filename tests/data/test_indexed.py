"""The `.bin/.idx` format: golden bytes, round trips, and what damaged files get."""

import struct

import numpy as np
import pytest

from megatron_ds.data.text import indexed
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter, dtype_for
from megatron_ds.errors import DataError

pytestmark = pytest.mark.plan

GOLDEN_BIN = bytes.fromhex("0100020003000400050006000700")
GOLDEN_IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000200000002000000"
    "000000000000000006000000000000000a00000000000000000000000000000002000000000000000300000000000000"
)
GOLDEN_IDX_INT32 = bytes.fromhex(
    "4d4d4944494458000001000000000000000401000000000000000200000000000000"
    "010000000000000000000000"
    "00000000000000000100000000000000"
)


def golden(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as w:
        w.add_document([1, 2, 3, 4, 5], lengths=[3, 2])
        w.add_document([6, 7])
    return tmp_path / "c"


def test_written_bytes_are_the_golden_bytes(tmp_path):
    prefix = golden(tmp_path)
    assert (tmp_path / "c.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "c.idx").read_bytes() == GOLDEN_IDX
    assert [s.tolist() for s in IndexedDataset(prefix)] == [[1, 2, 3], [4, 5], [6, 7]]
    with IndexedWriter(tmp_path / "wide", np.int32) as w:
        w.add_document([70000])
    assert (tmp_path / "wide.idx").read_bytes() == GOLDEN_IDX_INT32
    assert (tmp_path / "wide.bin").read_bytes() == struct.pack("<i", 70000)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]
)
def test_every_type_comes_back_as_it_was_written(tmp_path, dtype):
    random = np.random.RandomState(7)
    documents = [random.randint(0, 100, n).astype(dtype) for n in (5, 1, 0, 13, 0, 2)]
    with IndexedWriter(tmp_path / "c", dtype) as w:
        for d in documents:
            w.add_document(d)
    corpus = IndexedDataset(tmp_path / "c")
    corpus.check()
    assert (
        corpus.dtype == dtype and corpus.num_documents == 6 and corpus.num_tokens == 21
    )
    assert corpus.document_indices.tolist() == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
    ]  # an empty document has no sequence
    assert [s.tolist() for s in corpus] == [d.tolist() for d in documents if len(d)]
    assert corpus.get(2, 4, 3).tolist() == documents[3][4:7].tolist()


def test_a_corpus_without_documents_can_be_written_and_read(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16):
        pass
    corpus = IndexedDataset(tmp_path / "c.idx")
    corpus.check()
    assert len(corpus) == corpus.num_documents == corpus.num_tokens == 0


def test_an_index_with_modes_is_accepted(tmp_path):
    prefix = golden(tmp_path)
    with open(tmp_path / "c.idx", "ab") as f:
        f.write(bytes(3))
    assert len(IndexedDataset(prefix)) == 3


def test_an_error_while_writing_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "c", np.uint16) as w:
        w.add_document([1])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_another_process_is_writing_is_left_to_it(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as w:
        w.add_document([1, 2])
        with pytest.raises(
            DataError, match="c.bin.partial is being written by another process"
        ):
            IndexedWriter(tmp_path / "c", np.uint16)
    assert [s.tolist() for s in IndexedDataset(tmp_path / "c")] == [[1, 2]]
    (tmp_path / "c.bin.partial").write_bytes(b"left by a killed one")
    with IndexedWriter(tmp_path / "c", np.uint16) as w:
        w.add_document([3])
    assert [s.tolist() for s in IndexedDataset(tmp_path / "c")] == [[3]]


def test_ids_that_do_not_fit_the_type_are_refused(tmp_path):
    for bad in ([65536], [-1]):
        with (
            pytest.raises(DataError, match="do not fit uint16"),
            IndexedWriter(tmp_path / "c", np.uint16) as w,
        ):
            w.add_document(bad)
    assert (
        dtype_for(65499) == np.uint16
        and dtype_for(65500) == np.int32
        and dtype_for(None) == np.int32
    )


def change(path, start, data):
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    "file, start, data, told",
    [
        ("c.idx", 0, b"X", "begins with"),
        ("c.idx", 0, b"TNTIDX", "fairseq"),
        ("c.idx", 9, b"\x02", "version is 2"),
        ("c.idx", 17, b"\x09", "code 9"),
        ("c.idx", 18, b"\x04", "truncated"),
        ("c.idx", 18, b"\x02", "too long"),
        ("c.idx", 34, b"\x02", "does not continue"),
        ("c.idx", 34, struct.pack("<i", -3), "does not continue"),
        ("c.idx", 46 + 8, b"\x07", "does not continue"),
        ("c.idx", 70 + 8, b"\x04", "go backwards"),
        ("c.idx", 70 + 16, b"\x02", "cover sequences 0 to 2 of 3"),
    ],
)
def test_a_damaged_index_is_an_error_naming_file_and_defect(
    tmp_path, file, start, data, told
):
    prefix = golden(tmp_path)
    change(tmp_path / file, start, data)
    with pytest.raises(DataError, match=told) as e:
        IndexedDataset(prefix).check()
    assert str(tmp_path / file) in str(e.value)


@pytest.mark.parametrize(
    "file, size, told",
    [
        ("c.bin", 13, "truncated: 13 bytes"),
        ("c.bin", 0, "truncated: 0 bytes"),
        ("c.idx", 93, "truncated: 93 bytes"),
        ("c.idx", 20, "fewer than its header"),
        ("c.idx", 0, "fewer than its header"),
    ],
)
def test_a_truncated_file_is_an_error_naming_it(tmp_path, file, size, told):
    prefix = golden(tmp_path)
    with open(tmp_path / file, "r+b") as f:
        f.truncate(size)
    with pytest.raises(DataError, match=told) as e:
        IndexedDataset(prefix)
    assert str(tmp_path / file) in str(e.value)


def test_a_missing_file_is_an_error_naming_it(tmp_path):
    prefix = golden(tmp_path)
    (tmp_path / "c.bin").unlink()
    with pytest.raises(DataError, match=r"c\.bin does not exist"):
        IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        IndexedDataset(tmp_path / "nowhere")


def test_a_corpus_above_four_gibibytes_is_read_to_its_end(tmp_path):
    lengths = np.array(
        [2**30 + 7, 3, 5], np.int32
    )  # int32 tokens; the first are a hole in the file
    sizes = lengths.astype(np.int64) * 4
    with open(tmp_path / "large.idx", "wb") as f:
        f.write(indexed.HEADER.pack(indexed.MAGIC, 1, 4, 3, 4) + lengths.tobytes())
        f.write(
            (np.cumsum(sizes) - sizes).tobytes()
            + np.arange(4, dtype=np.int64).tobytes()
        )
    with open(tmp_path / "large.bin", "wb") as f:
        f.seek(int(sizes[0]) - 4)
        f.write(np.arange(100, 109, dtype=np.int32).tobytes())
    assert (tmp_path / "large.bin").stat().st_size > 2**32 and (
        tmp_path / "large.bin"
    ).stat().st_blocks < 100
    corpus = IndexedDataset(tmp_path / "large")
    corpus.check()
    assert corpus[1].tolist() == [101, 102, 103] and corpus[2].tolist() == [
        104,
        105,
        106,
        107,
        108,
    ]
    assert corpus.get(0, 2**30 + 5).tolist() == [
        0,
        100,
    ] and corpus.num_tokens == lengths.sum(dtype=np.int64)


def test_all_lengths_of_a_long_corpus_are_part_of_the_key_of_its_maps(
    tmp_path, monkeypatch
):
    """Blocks of 2 lengths, of which 3 are in the fingerprint: it begins at 0, 9 and 18 of 20 lengths."""
    monkeypatch.setattr(indexed, "FINGERPRINT_BLOCKS", 3)
    monkeypatch.setattr(indexed, "FINGERPRINT_BLOCK", 2)
    keys = []
    for lengths in ([3, 4, 5, 6] * 5, [3, 4, 6, 5] + [3, 4, 5, 6] * 4):
        with IndexedWriter(tmp_path / "text", np.uint16) as writer:
            for length in lengths:
                writer.add_document([1] * length)
        corpus = IndexedDataset(tmp_path / "text")
        keys.append(corpus.key(range(20)))
    assert keys[0]["corpus"] == keys[1]["corpus"]
    assert keys[0] != keys[1]
