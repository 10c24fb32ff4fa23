"""Where text comes from: compressed files, tables, slices of files; and what damaged ones get."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys

import numpy as np
import pytest

from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.corpora.text_files import (
    FileSlice,
    check_files,
    read_blocks,
    slices_of_shard,
    texts_of,
)
from megatron_ds.extensions.corpora.text_records import lines_before, place_of

pytestmark = pytest.mark.plan

TEXTS = [f"{'word ' * (n % 7)}{n} größe" for n in range(2500)]


def lines_of(texts):
    records = ({"text": t, "id": str(i)} for i, t in enumerate(texts))
    return b"".join(
        json.dumps(r, ensure_ascii=i % 2 == 0).encode() + b"\n"
        for i, r in enumerate(records)
    )


def write(path, texts=TEXTS):
    """The texts in a file of the kind that its name says."""
    data, end = lines_of(texts), path.suffix
    if end == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table(
            {"text": texts, "id": [str(i) for i in range(len(texts))]}
        )
        pyarrow.parquet.write_table(table, path, row_group_size=700)
    elif end == ".h5":
        import h5py

        with h5py.File(path, "w") as f:
            for key, column in (
                ("text", texts),
                ("id", [str(i) for i in range(len(texts))]),
            ):
                f.create_dataset(key, data=column, dtype=h5py.string_dtype())
    elif end == ".zst":
        import zstandard

        half = len(data) // 2  # two frames, the first ending within a line
        path.write_bytes(
            b"".join(
                zstandard.ZstdCompressor().compress(part)
                for part in (data[:half], data[half:])
            )
        )
    else:
        path.write_bytes(
            {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(
                end, bytes
            )(data)
        )
    return str(path)


def read(slices, keys=("text",)):
    found = []
    for piece in slices:
        for block in read_blocks(
            piece.path, 1000, keys=keys, start=piece.start, stop=piece.stop
        ):
            columns, bad = texts_of(block, keys)
            assert not bad
            found += zip(*columns)
    return found


ENDS = ["jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "parquet", "h5"]


@pytest.mark.parametrize("end", ENDS)
def test_every_kind_of_file_gives_the_same_documents(end, tmp_path):
    path = write(tmp_path / f"a.{end}")
    assert read([FileSlice(path)], ("text", "id")) == [
        (t, str(i)) for i, t in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_the_shards_in_order_are_the_files_in_order(count, tmp_path):
    paths = [
        write(tmp_path / f"{i}.{end}", TEXTS[i * 350 : (i + 1) * 350])
        for i, end in enumerate(ENDS)
    ]
    shards = [slices_of_shard(paths, ("text",), i, count) for i in range(count)]
    assert [text for shard in shards for (text,) in read(shard)] == TEXTS[
        : 350 * len(ENDS)
    ]
    assert count == 1 or sum(bool(shard) for shard in shards) > 1


def test_a_line_belongs_to_the_shard_in_which_it_begins_wherever_the_cut_is(tmp_path):
    path = write(tmp_path / "a.jsonl", ["a", "bb", "", "cccc" * 50, "d"])
    size = os.path.getsize(path)
    for cut in range(size + 1):
        assert read([FileSlice(path, 0, cut), FileSlice(path, cut, size)]) == [
            ("a",),
            ("bb",),
            ("",),
            ("cccc" * 50,),
            ("d",),
        ]


def test_a_bad_line_of_a_slice_is_told_by_its_number_in_the_file(tmp_path):
    lines = [b'{"text": "x"}\n'] * 500
    lines[333] = b"{bad}\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    path, size = str(tmp_path / "a.jsonl"), os.path.getsize(tmp_path / "a.jsonl")
    for start in (0, 1, 14, 2999, 333 * 14):
        told = [
            str(b)
            for block in read_blocks(path, 100, start=start, stop=size)
            for b in texts_of(block, ["text"])[1]
        ]
        assert len(told) == 1 and f"{path}, line 334: " in told[0]
    *_, last = read_blocks(path, 10_000, start=2999, stop=size)
    assert (
        place_of(last).endswith("lines 216 to 500") and lines_before(path, 2999) == 215
    )


@pytest.mark.parametrize("end", ENDS[1:])
@pytest.mark.parametrize("how", ["cut short", "of another kind"])
def test_a_damaged_file_is_an_error_naming_it(end, how, tmp_path):
    path = write(tmp_path / f"a.{end}")
    if how == "cut short":
        os.truncate(path, os.path.getsize(path) * 2 // 3)
    else:
        (tmp_path / f"a.{end}").write_bytes(lines_of(TEXTS))
    with pytest.raises(
        DataError, match=f"a.{end} (is damaged after line|cannot be read as)"
    ):
        read([FileSlice(path)])


@pytest.mark.parametrize("end", ["parquet", "h5"])
def test_a_table_without_the_key_or_with_a_hole_says_so(end, tmp_path):
    path = write(tmp_path / f"a.{end}", TEXTS[:5])
    with pytest.raises(
        DataError, match=f"a.{end} has no column 'body'; it has .*'text'"
    ):
        read([FileSlice(path)], ("body",))
    if end == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
        (block,) = read_blocks(path)
        texts, bad = texts_of(block, ["text"])
        assert texts == [["a", "b"]] and [str(b) for b in bad] == [
            f"{path}, row 1: 'text' is NoneType, not text"
        ]
    else:
        import h5py

        with h5py.File(path, "w") as f:
            f["text"] = np.zeros((2, 2))
        with pytest.raises(DataError, match="arrays of one dimension"):
            read([FileSlice(path)])


@pytest.mark.parametrize(
    "end, package", [("parquet", "pyarrow"), ("h5", "h5py"), ("jsonl.zst", "zstandard")]
)
def test_a_package_that_is_missing_is_an_error_naming_the_extra(
    end, package, tmp_path, monkeypatch
):
    path = write(tmp_path / f"a.{end}", TEXTS[:5])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf'{package}.*python -m pip install "megatron_ds\[data\]"'
    ):
        read([FileSlice(path)])


def test_standard_input_is_read_once_and_not_cut(tmp_path, monkeypatch):
    with open(write(tmp_path / "a.jsonl"), "rb") as f:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(f))
        assert read(slices_of_shard(["-"], ("text",), 0, 1)) == [(t,) for t in TEXTS]
    with pytest.raises(DataError, match="cannot be cut"):
        slices_of_shard(["-"], ("text",), 0, 2)
    with pytest.raises(DataError, match="read only once"):
        check_files(["-", "-"])
