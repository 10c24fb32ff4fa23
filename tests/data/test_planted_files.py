"""Pipes, links and odd inputs where a file belongs: no wait, no victim overwritten, no document lost."""

import hashlib
import os

import numpy as np
import pytest

from megatron_ds.compat.conversion.files.torch_file import read_torch_file
from megatron_ds.data.loading.cache import CacheEntry, DamagedEntry, sums_of
from megatron_ds.data.text import indexed
from megatron_ds.errors import CheckpointError, DataError
from megatron_ds.extensions.corpora import preprocess_data
from megatron_ds.extensions.corpora.corpus_record import read_record
from megatron_ds.extensions.corpora.corpus_shards import merge
from megatron_ds.extensions.data_efficiency.difficulty_metrics import ListFile
from megatron_ds.extensions.kernels.gpu.kernel_cache import (
    FORMAT,
    CompiledKernel,
    KernelCache,
)

pytestmark = pytest.mark.plan

TEXT = '{"text": "1 2 3"}\n{"text": "4 5"}\n'
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]


def preprocess(folder, text=TEXT, name="in.jsonl", more=()):
    """The exit code of the tool, which writes folder/out_text_document."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return preprocess_data.main(
        [
            "--input",
            str(folder / name),
            "--output-prefix",
            str(folder / "out"),
            *TOKENIZER,
            *more,
        ]
    )


def documents(prefix):
    return [ids.tolist() for ids in indexed.IndexedDataset(prefix)]


@pytest.mark.parametrize("ending", ["bin", "idx", "json"])
def test_a_link_with_the_name_of_a_partial_file_overwrites_no_victim(ending, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"out_text_document.{ending}.partial").symlink_to(victim)
    code = preprocess(tmp_path)
    assert victim.read_text() == "precious" and code == (2 if ending == "bin" else 0)


def test_a_second_name_of_a_victim_is_not_emptied(tmp_path):
    (tmp_path / "victim").write_text("precious")
    os.link(tmp_path / "victim", tmp_path / "out_text_document.bin.partial")
    assert preprocess(tmp_path) == 2 and (tmp_path / "victim").read_text() == "precious"


def test_a_pipe_with_the_name_of_a_partial_file_is_an_error(tmp_path, capsys):
    os.mkfifo(tmp_path / "out_text_document.bin.partial")
    assert (
        preprocess(tmp_path) == 2
        and "is a link or a pipe. Remove it." in capsys.readouterr().err
    )


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_merge_follows_no_link(ending, tmp_path):
    (tmp_path / "victim").write_text("precious")
    assert preprocess(tmp_path) == 0
    (tmp_path / f"all.{ending}.partial").symlink_to(tmp_path / "victim")
    merge([str(tmp_path / "out_text_document")] * 2, str(tmp_path / "all"))
    assert (tmp_path / "victim").read_text() == "precious"
    assert documents(tmp_path / "all") == [[1, 2, 3], [4, 5]] * 2


def test_a_pipe_in_the_cache_of_indices_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a regular file"):
        sums_of(tmp_path / "pipe")
    entry = CacheEntry(tmp_path, "title", {"key": 1}, ["values"])
    entry.store({"values": np.arange(5)}, is_alone=True)
    assert entry.load(verify_large=True)["values"].tolist() == [0, 1, 2, 3, 4]
    for name in (f"{entry.stem}-values.npy", f"{entry.stem}-description.txt"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(DamagedEntry, match="is not a regular file"):
            entry.load(verify_large=True)


def test_a_pipe_in_place_of_a_record_or_an_index_of_metrics_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "c.json")
    os.mkfifo(tmp_path / "c.idx")
    (tmp_path / "c.bin").touch()
    for read in (read_record, ListFile, indexed.IndexedDataset):
        with pytest.raises(DataError, match=r"c\.(json|idx) is"):
            read(tmp_path / "c")


def test_a_pipe_among_the_files_of_a_checkpoint_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_torch_file(tmp_path / "mp_rank_00_model_states.pt")


def test_the_kernel_cache_takes_only_the_file_that_was_written_under_the_key(tmp_path):
    cache, kernel = KernelCache(tmp_path), CompiledKernel("symbol", b"code")
    cache.write("one", kernel)
    assert cache.read("one") == kernel
    (tmp_path / "two").write_bytes((tmp_path / "one").read_bytes())
    assert cache.read("two") is None  # renamed or copied: the code of another kernel
    payload = b"\xff\xfe\0code"
    digest = hashlib.sha256(b"three\0" + payload).digest()
    (tmp_path / "three").write_bytes(FORMAT + digest + payload)
    assert cache.read("three") is None
    os.mkfifo(tmp_path / "four")
    assert cache.read("four") is None


# ------------------------------------------------------------------------------------------------- inputs
MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "more", [(), ("--skip-bad-lines",), ("--partitions", "2", "--workers", "2")]
)
def test_json_lines_may_begin_with_a_byte_order_mark(more, tmp_path):
    assert preprocess(tmp_path, MARK + TEXT.encode(), more=more) == 0
    assert documents(tmp_path / "out_text_document") == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("more", [(), ("--skip-bad-lines",)])
@pytest.mark.parametrize(
    "array",
    ['[\n{"text": "1"},\n{"text": "2"}\n]\n', '[{"text": "1"}]', '[ {"text": "1"},\n'],
)
def test_a_json_array_is_an_error_that_names_the_conversion(
    array, more, tmp_path, capsys
):
    assert preprocess(tmp_path, array, more=more) == 2
    assert "in.jsonl is a JSON array" in capsys.readouterr().err


def test_a_pattern_stands_for_its_files_in_the_order_of_their_names(tmp_path, capsys):
    for name, text in (("b", "3 4"), ("a", "1 2"), ("c", "5")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    (tmp_path / "other.txt").write_text("9")
    code = preprocess_data.main(
        [
            "--input",
            str(tmp_path / "*.jsonl"),
            "--output-prefix",
            str(tmp_path / "out"),
            *TOKENIZER,
        ]
    )
    assert code == 0 and documents(tmp_path / "out_text_document") == [
        [1, 2],
        [3, 4],
        [5],
    ]
    assert (
        preprocess_data.main(
            [
                "--input",
                str(tmp_path / "*.lines"),
                "--output-prefix",
                str(tmp_path / "x"),
                *TOKENIZER,
            ]
        )
        == 2
    )
    assert "no file has a name of this pattern" in capsys.readouterr().err


def test_a_file_whose_name_has_the_signs_of_a_pattern_is_that_file(tmp_path):
    assert preprocess(tmp_path, name="in[1].jsonl") == 0
    assert documents(tmp_path / "out_text_document") == [[1, 2, 3], [4, 5]]


def test_a_line_beyond_the_bound_is_refused_before_it_is_read_whole(
    tmp_path, monkeypatch, capsys
):
    import gzip

    from megatron_ds.extensions.corpora import text_files

    monkeypatch.setattr(text_files, "LONGEST_BYTES", 1000)
    read = []
    monkeypatch.setattr(
        gzip.GzipFile,
        "readline",
        lambda self, size=-1, line=gzip.GzipFile.readline: (
            read.append(size) or line(self, size)
        ),
    )
    text = gzip.compress(TEXT.encode() + b'{"text": "' + b"1 " * 10**6 + b'"}\n')
    assert preprocess(tmp_path, text, name="in.jsonl.gz") == 2
    assert "line 3 is longer than 0 MiB" in capsys.readouterr().err and set(read) == {
        1001
    }
    assert np.all(np.array(read) > 0)
