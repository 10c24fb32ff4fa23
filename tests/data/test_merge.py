"""Corpora merged: the bytes that one writer would have written; checksums; and what cannot be merged."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.text import indexed
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora import corpus_record
from megatron_ds.extensions.corpora import corpus_shards as merging
from megatron_ds.extensions.corpora.corpus_record import (
    CorpusRecord,
    FilePiece,
    check_sums,
    read_record,
    sha256_of,
)
from megatron_ds.extensions.corpora.corpus_shards import merge
from tests.harness.deaths import die_at_change, forked, survived

pytestmark = pytest.mark.plan


def documents(seed, count):
    random = np.random.RandomState(seed)
    return [
        [
            random.randint(0, 60000, random.randint(1, 9)).astype(np.uint16)
            for _ in range(random.randint(0, 4))
        ]
        for _ in range(count)
    ]


def write(prefix, docs, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as w:
        for sentences in docs:
            w.add_document(
                np.concatenate([np.empty(0, dtype), *sentences]),
                [len(s) for s in sentences],
            )
    return str(prefix)


def bytes_of(prefix):
    return [open(f"{prefix}.{end}", "rb").read() for end in ("bin", "idx")]


def with_record(prefix, tokenizer="T:1"):
    corpus = IndexedDataset(prefix)
    size = corpus.num_tokens * corpus.dtype.itemsize
    CorpusRecord(
        corpus.num_documents,
        corpus.num_tokens,
        tokenizer,
        [FilePiece(size, sha256_of(corpus.bin_path))],
        sha256_of(corpus.idx_path),
    ).write(prefix)
    return prefix


@pytest.mark.parametrize("counts", [[5, 3], [0, 4, 0], [1], [0, 0], [7, 1, 20, 3]])
def test_merged_corpora_are_what_one_writer_would_have_written(
    counts, tmp_path, monkeypatch
):
    monkeypatch.setattr(indexed, "ROWS", 3)  # many pieces
    monkeypatch.setattr(merging, "COPY_BYTES", 7)
    parts = [documents(i, n) for i, n in enumerate(counts)]
    prefixes = [write(tmp_path / f"part{i}", docs) for i, docs in enumerate(parts)]
    assert (
        merge(prefixes, str(tmp_path / "all"), workers=3) is None
    )  # no records, no checksums
    write(tmp_path / "want", [d for docs in parts for d in docs])
    assert bytes_of(tmp_path / "all") == bytes_of(tmp_path / "want")
    assert not list(tmp_path.glob("*.partial"))


def test_several_documents_at_once_are_what_they_are_one_by_one(tmp_path):
    docs = documents(3, 30)
    write(tmp_path / "one", docs)
    with IndexedWriter(tmp_path / "bulk", np.uint16) as w:
        for part in (docs[:11], docs[11:11], docs[11:]):
            rows = [s for d in part for s in d]
            w.add_documents(
                np.concatenate([np.empty(0, np.uint16), *rows]),
                np.array([len(s) for s in rows], np.int64),
                np.array([len(d) for d in part], np.int64),
            )
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "bulk")


def test_a_merged_corpus_has_the_checksums_of_its_parts_and_a_changed_byte_is_found(
    tmp_path,
):
    prefixes = [
        with_record(write(tmp_path / f"p{i}", documents(i, 6))) for i in range(3)
    ]
    record = merge(prefixes, str(tmp_path / "all"))
    assert (
        record == read_record(tmp_path / "all")
        and len(record.pieces) == 3
        and record.documents == 18
    )
    check_sums(tmp_path / "all", record)
    first = record.pieces[0].bytes
    for name, at, told in [
        ("all.bin", first + 1, f"all.bin is damaged between bytes {first} and"),
        ("all.idx", 40, "all.idx is damaged"),
    ]:
        data = bytearray((tmp_path / name).read_bytes())
        data[at] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=told):
            check_sums(tmp_path / "all", record)
        data[at] ^= 1
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="do not belong together"):
        check_sums(
            tmp_path / "all", dataclasses.replace(record, pieces=record.pieces[:2])
        )


def test_what_cannot_be_merged_is_an_error_and_leaves_nothing(tmp_path):
    narrow, other = (
        write(tmp_path / "a", documents(0, 3)),
        write(tmp_path / "b", documents(1, 3)),
    )
    with_record(narrow)
    with_record(other, "T:2")
    wide, out = (
        write(tmp_path / "wide", [[np.array([70000], np.int32)]], np.int32),
        str(tmp_path / "out"),
    )
    cut = write(tmp_path / "cut", documents(2, 3))
    with open(f"{cut}.bin", "r+b") as f:
        f.truncate(3)
    for prefixes, output, told in [
        ([narrow, wide], out, "wide has tokens of type int32 and .*a of uint16"),
        ([narrow, other], out, "the tokenizer T:2 and"),
        ([narrow, cut], out, "cut.bin is damaged: it is truncated"),
        ([narrow, narrow], narrow, "is one of the corpora"),
        ([narrow, str(tmp_path / "none")], out, "none.idx does not exist"),
        ([], out, "no corpora"),
        ([narrow], f"{narrow}.bin/x", "cannot write"),
    ]:
        with pytest.raises(DataError, match=told):
            merge(prefixes, output)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob("*.partial"))
    IndexedDataset(narrow).check()


def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch):
    prefixes = [write(tmp_path / f"p{i}", documents(i, 6)) for i in range(2)]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging.os, "pwrite", full)
    with pytest.raises(DataError, match="No space left on device. Nothing was kept"):
        merge(prefixes, str(tmp_path / "all"))
    assert not list(tmp_path.glob("all*"))


def test_killed_at_any_change_of_the_disk_a_merge_leaves_the_old_the_new_or_nothing(
    tmp_path,
):
    """SIGKILL before each change in turn, over a corpus of that name; the same command then ends with the
    same bytes."""
    prefixes = [
        with_record(write(tmp_path / f"p{i}", documents(i, 6))) for i in range(2)
    ]
    merge(prefixes, str(tmp_path / "want"))
    old = [*bytes_of(prefixes[0]), (tmp_path / "p0.json").read_bytes()]
    new = [*bytes_of(tmp_path / "want"), (tmp_path / "want.json").read_bytes()]
    out, left, n = tmp_path / "out", [], 0
    while True:
        n += 1
        for end, content in zip(("bin", "idx", "json"), old):
            Path(f"{out}.{end}").write_bytes(content)
        done = survived(forked(lambda: (die_at_change(n), merge(prefixes, str(out)))))  # noqa: B023
        if not out.with_suffix(".idx").exists():
            left.append("nothing")
            with pytest.raises(DataError, match="out.idx does not exist"):
                IndexedDataset(out)
            assert not out.with_suffix(".json").exists()
        else:
            found, record = bytes_of(out), read_record(out)
            left.append("old" if found == old[:2] else "new")
            assert found in (old[:2], new[:2]) and (
                record is None or check_sums(out, record) is None
            )
        if done:
            break
        merge(prefixes, str(out))
        assert [
            *bytes_of(out),
            out.with_suffix(".json").read_bytes(),
        ] == new and not list(tmp_path.glob("*.partial"))
    assert left == sorted(left, key=["old", "nothing", "new"].index) and set(left) == {
        "old",
        "nothing",
        "new",
    }


def test_something_else_under_the_name_of_a_record_is_an_error(tmp_path):
    prefix = with_record(write(tmp_path / "a", documents(0, 3)))
    assert corpus_record.record_path(f"{prefix}.idx") == tmp_path / "a.json"
    for text in ("{", json.dumps({"documents": 3}), "[]"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DataError, match="a.json is not the record"):
            read_record(prefix)
    assert corpus_record.done_before(prefix, {}) is None
