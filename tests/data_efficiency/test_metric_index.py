"""Index files of metrics: DeepSpeed's bytes, and no half-written file that looks whole."""

import errno
import os

import numpy as np
import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.data_efficiency.difficulty_metrics import (
    ListFile,
    fitting_dtype,
    write_list_file,
    write_metric,
    write_total,
)

pytestmark = pytest.mark.plan

# Written by DeepSpeed 0.19.8's MMapIndexedDatasetBuilder: rows, their type, .bin, .idx.
DEEPSPEED = [
    (
        [[1, 70000], [3]],
        np.uint32,
        "010000007011010003000000",
        "4d4d494449445800000100000000000000070200000000000000020000000000000002000000010000000000000000000000080000000000000000000000"
        "000000000200000000000000",
    ),
    (
        [[2**40]],
        np.uint64,
        "0000000000010000",
        "4d4d4944494458000001000000000000000801000000000000000200000000000000010000000000000000000000000000000000000001000000"
        "00000000",
    ),
]


@pytest.mark.parametrize("rows, dtype, bin_bytes, idx_bytes", DEEPSPEED)
def test_files_have_deepspeeds_bytes(tmp_path, rows, dtype, bin_bytes, idx_bytes):
    write_list_file(
        tmp_path / "ours",
        np.concatenate(rows).astype(dtype),
        [len(row) for row in rows],
    )
    assert (tmp_path / "ours.bin").read_bytes().hex() == bin_bytes
    assert (tmp_path / "ours.idx").read_bytes().hex() == idx_bytes
    (tmp_path / "theirs.bin").write_bytes(bytes.fromhex(bin_bytes))
    (tmp_path / "theirs.idx").write_bytes(bytes.fromhex(idx_bytes))
    found = ListFile(tmp_path / "theirs")
    assert [
        found[i].tolist() for i in range(len(found))
    ] == rows and found.flat.dtype == dtype


@pytest.mark.parametrize(
    "low, high, dtype",
    [
        (0, 255, "uint8"),
        (0, 256, "uint16"),
        (0, 65536, "uint32"),
        (0, 2**32, "uint64"),
        (-1, 127, "int8"),
        (-1, 128, "int16"),
        (-32769, 0, "int32"),
        (-1, 2**31, "int64"),
    ],
)
def test_the_type_is_the_narrowest(low, high, dtype):
    assert fitting_dtype(low, high) == dtype
    with pytest.raises(DataError, match="do not fit 64 bits"):
        fitting_dtype(-1, 2**63)


def test_a_metric_is_sorted_by_value_and_then_by_sample(tmp_path):
    values = np.array([7, 300, 7, 2, 300, 7])
    write_metric(tmp_path / "m" / "m", values)
    assert (
        ListFile(tmp_path / "m" / "m_sample_to_metric").flat.tolist() == values.tolist()
    )
    read = {
        what: ListFile(tmp_path / "m" / f"m_{what}")
        for what in ("index_to_metric", "index_to_sample")
    }
    assert read["index_to_metric"].flat.tolist() == [2, 7, 300]
    assert [read["index_to_sample"][i].tolist() for i in range(3)] == [
        [3],
        [0, 2, 5],
        [1, 4],
    ]


@pytest.mark.parametrize("distinct", [1, 99, 100, 199, 200, 250, 1000])
def test_percentiles_take_a_hundredth_of_the_values_together(tmp_path, distinct):
    values = np.arange(3 * distinct) % distinct
    write_metric(tmp_path / "m", values)
    step, whole = max(1, distinct // 100), ListFile(tmp_path / "m_index_to_sample")
    merged = ListFile(tmp_path / "m_index_to_sample_percentile_merged")
    assert [row.tolist() for row in map(merged.__getitem__, range(len(merged)))] == [
        np.concatenate(
            [whole[v] for v in range(first, min(distinct, first + step))]
        ).tolist()
        for first in range(0, distinct, step)
    ]


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda b, i: i.unlink(), "m.idx does not exist"),
        (lambda b, i: b.unlink(), "m.bin does not exist"),
        (
            lambda b, i: b.write_bytes(b.read_bytes()[:-1]),
            "has 11 bytes, where its 2 rows of 3 numbers take 12",
        ),
        (
            lambda b, i: i.write_bytes(i.read_bytes()[:-1]),
            "has 73 bytes, where 2 rows take 74",
        ),
        (lambda b, i: i.write_bytes(i.read_bytes()[:20]), "fewer than its header"),
        (
            lambda b, i: i.write_bytes(b"TNTIDX" + i.read_bytes()[6:]),
            "not an index of this format",
        ),
        (
            lambda b, i: i.write_bytes(
                i.read_bytes()[:17] + b"\x09" + i.read_bytes()[18:]
            ),
            "type 9: not an index",
        ),
        (
            lambda b, i: i.write_bytes(
                i.read_bytes()[:34] + b"\xff\xff\xff\xff" + i.read_bytes()[38:]
            ),
            "is damaged",
        ),
    ],
)
def test_a_damaged_pair_is_a_data_error(tmp_path, spoil, said):
    write_list_file(tmp_path / "m", np.array([1, 70000, 3], np.uint32), [2, 1])
    assert len(ListFile(tmp_path / "m")) == 2
    spoil(tmp_path / "m.bin", tmp_path / "m.idx")
    with pytest.raises(DataError, match=said):
        ListFile(tmp_path / "m")


def test_on_a_full_disk_nothing_is_left_and_nothing_old_stands_beside_something_new(
    tmp_path, monkeypatch
):
    write_total(tmp_path / "m", np.array([1, 2]))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match="m_metric_value.bin: No space left on device. Free some space"
    ):
        write_total(tmp_path / "m", np.array([1, 2, 3]))
    assert [path.name for path in tmp_path.iterdir()] == ["m_metric_value.bin"]
    with pytest.raises(DataError, match="m_metric_value.idx does not exist"):
        ListFile(tmp_path / "m_metric_value")


def test_a_row_of_more_samples_than_the_format_counts_is_a_data_error(tmp_path):
    flat = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.uint8), (2**31,), (0,)
    )  # no memory behind it
    with pytest.raises(DataError, match="2147483648 samples have the same value"):
        write_list_file(tmp_path / "m", flat, [2**31])
