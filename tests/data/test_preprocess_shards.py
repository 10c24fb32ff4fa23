"""Corpora made in shards and partitions, killed and begun again; sentences; the tools that merge and
inspect."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.corpora import corpus_record
from megatron_ds.extensions.corpora import preprocess as preprocessing
from megatron_ds.extensions.corpora.corpus_record import check_sums, read_record
from megatron_ds.extensions.corpora.corpus_shards import (
    preprocess_in_shards,
    run_on_ray,
)
from megatron_ds.extensions.corpora.plain_text import TextCut
from megatron_ds.extensions.corpora.preprocess import PreprocessOptions, preprocess
from megatron_ds.extensions.corpora.sentences import learn_splitter
from megatron_ds.extensions.corpora.text_files import files_of, read_blocks
from tests.harness.limits import HUNG

from .test_preprocess import NULL, run_tool, write_lines

pytestmark = pytest.mark.processes

TOOLS = Path(__file__).parents[2] / "tools"
NULL_FLAGS = "--tokenizer-type NullTokenizer --vocab-size 100 --append-eod".split()


def corpus_lines(count=400):
    random = np.random.RandomState(11)
    texts = (
        " ".join(map(str, random.randint(0, 100, random.randint(0, 30))))
        for _ in range(count)
    )
    return [{"text": text, "title": str(i % 90)} for i, text in enumerate(texts)]


def bytes_of(prefix):
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def test_merged_shards_are_the_bytes_of_one_run_and_a_done_shard_is_not_made_again(
    tmp_path, capsys, caplog
):
    caplog.set_level(logging.INFO)
    paths = [
        write_lines(tmp_path / "a.jsonl", corpus_lines()),
        write_lines(tmp_path / "b.jsonl.gz", corpus_lines(50)),
    ]
    preprocess(paths, str(tmp_path / "one"), NULL, PreprocessOptions(append_eod=True))
    make = partial(
        preprocess,
        paths,
        str(tmp_path / "c"),
        NULL,
        options=PreprocessOptions(append_eod=True),
    )
    written = [make(shard=(i, 5)) for i in range(5)]
    assert sum(w.documents for w in written) == 450 and not any(
        w.done_before for w in written
    )
    told = run_tool(
        capsys,
        "merge_datasets",
        "--input",
        *(tmp_path / f"c_0000{i}_of_00005_text_document" for i in range(5)),
        "--output-prefix",
        tmp_path / "merged",
    )
    assert told[0] == 0 and "450 documents" in caplog.text
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / "one_text_document")
    check_sums(tmp_path / "merged", read_record(tmp_path / "merged"))

    again = make(shard=(2, 5))
    assert again.done_before and (again.documents, again.tokens) == (
        written[2].documents,
        written[2].tokens,
    )
    assert not partial(make, options=PreprocessOptions())(
        shard=(2, 5)
    ).done_before  # another making
    assert not make(shard=(2, 5)).done_before
    os.truncate(tmp_path / "c_00002_of_00005_text_document.bin", 4)
    assert not make(shard=(2, 5)).done_before  # no longer whole
    os.utime(paths[0], ns=(1, 1))
    assert not make(shard=(2, 5)).done_before  # the input may have changed


def test_the_shard_is_told_by_a_flag_or_by_the_scheduler(
    tmp_path, capsys, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    path = write_lines(tmp_path / "a.jsonl", corpus_lines(30))
    base = [
        "preprocess_data",
        "--input",
        path,
        "--output-prefix",
        tmp_path / "c",
        *NULL_FLAGS,
        "--num-shards",
        3,
    ]
    for name in ("RANK", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN"):
        monkeypatch.delenv(name, raising=False)
    assert run_tool(capsys, *base)[1].startswith(
        "error: --num-shards 3 does not choose the shard"
    )
    assert run_tool(capsys, *base, "--shard-index", 0)[0] == 0
    monkeypatch.setenv("RANK", "a")
    assert "RANK=a, which is no number" in run_tool(capsys, *base)[1]
    monkeypatch.setenv("RANK", "1")
    assert run_tool(capsys, *base)[0] == 0
    for name, value in (("SLURM_ARRAY_TASK_ID", "9"), ("SLURM_ARRAY_TASK_MIN", "7")):
        monkeypatch.setenv(name, value)
    assert run_tool(capsys, *base)[0] == 0
    assert sorted(p.name[2:7] for p in tmp_path.glob("c_*.idx")) == [
        "00000",
        "00001",
        "00002",
    ]
    assert run_tool(capsys, *base)[0] == 0 and "done before" in caplog.text
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "10")
    assert "shards are numbered 0 to 2" in run_tool(capsys, *base)[1]
    (tmp_path / "c_00001_of_00003_text_document.idx").unlink()
    code, told = run_tool(
        capsys,
        "merge_datasets",
        "--input",
        tmp_path,
        "--output-prefix",
        tmp_path / "merged",
    )
    assert code == 2 and "1 are missing: 1." in told


@pytest.mark.quick
def test_partitions_write_the_bytes_of_one_run_and_clear_up(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    path = write_lines(tmp_path / "a.jsonl", corpus_lines())
    base = [
        "preprocess_data",
        "--input",
        path,
        *NULL_FLAGS,
        *"--json-keys text title --output-prefix".split(),
    ]
    assert run_tool(capsys, *base, tmp_path / "one")[0] == 0
    assert (
        run_tool(capsys, *base, tmp_path / "two", "--partitions", 2, "--workers", 2)[0]
        == 0
    )
    assert caplog.text.count("a shard is done") == 2
    for key in ("text", "title"):
        assert bytes_of(tmp_path / f"one_{key}_document") == bytes_of(
            tmp_path / f"two_{key}_document"
        )
    assert not list(tmp_path.glob("*_of_*"))


def text_files(folder, count=12):
    """A folder of plain text: numbers in lines and paragraphs, some files blank."""
    random = np.random.RandomState(5)
    for i in range(count):
        path = folder / f"part {i % 3}" / f"{i:02d}.{'md' if i % 4 else 'txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = random.randint(0, 5, 0 if i == 5 else 40)
        path.write_text(
            "".join(
                " ".join(map(str, random.randint(0, 100, size))) + "\n"
                for size in sizes
            )
        )
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--text-documents", "paragraph"],
        ["--text-documents", "line"],
        ["--text-separator", "7"],
        ["--split-sentences"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_shards_of_a_folder_of_text_merged_are_the_bytes_of_one_run(
    tmp_path, capsys, flags
):
    folder = text_files(tmp_path / "books")
    kind = "sentence" if "--split-sentences" in flags else "document"
    base = [
        "preprocess_data",
        "--input",
        folder,
        *NULL_FLAGS,
        *flags,
        "--output-prefix",
    ]
    assert run_tool(capsys, *base, tmp_path / "one")[0] == 0
    for i in range(3):
        assert (
            run_tool(
                capsys,
                *base,
                tmp_path / "shards" / "c",
                "--num-shards",
                3,
                "--shard-index",
                i,
            )[0]
            == 0
        )
    merge = ["--input", tmp_path / "shards", "--output-prefix", tmp_path / "merged"]
    assert run_tool(capsys, "merge_datasets", *merge)[0] == 0
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / f"one_text_{kind}")
    text = [
        line
        for path in sorted(folder.rglob("*.*"), key=lambda path: path.parts)
        for line in path.read_text().split("\n")
    ]
    separators = text.count("7") if "--text-separator" in flags else 0
    corpus = IndexedDataset(tmp_path / "merged")
    ids = [
        i
        for i in np.concatenate([corpus[i] for i in range(len(corpus))]).tolist()
        if i < 100
    ]
    assert len(ids) == sum(len(line.split()) for line in text) - separators
    assert flags or corpus.num_documents == 11


def test_a_shard_of_text_cut_otherwise_is_made_again(tmp_path):
    make = partial(
        preprocess,
        files_of([str(text_files(tmp_path / "books"))]),
        str(tmp_path / "c"),
        NULL,
        shard=(0, 2),
    )
    assert not make().done_before and make().done_before
    assert not make(PreprocessOptions(cut=TextCut("line"))).done_before


def in_turn(task, count):
    return (task(shard=(i, count)) for i in range(count))


def test_a_bad_line_in_one_partition_keeps_the_others_for_the_next_try(tmp_path):
    lines = corpus_lines(60)
    lines[55] = b"{bad\n"
    path = write_lines(tmp_path / "a.jsonl", lines)
    task = partial(preprocess, [path], str(tmp_path / "c"), NULL)
    with pytest.raises(DataError, match="a.jsonl, line 56: not JSON"):
        preprocess_in_shards(task, 4, str(tmp_path / "c"), ["text"], run=in_turn)
    assert (
        len(list(tmp_path.glob("c_*_of_00004_text_document.idx"))) == 3
        and not (tmp_path / "c_text_document.idx").exists()
    )
    written = preprocess_in_shards(
        partial(task, options=PreprocessOptions(skip_bad_lines=True)),
        4,
        str(tmp_path / "c"),
        ["text"],
        run=in_turn,
    )
    assert (written.documents, written.num_bad) == (59, 1) and read_record(
        tmp_path / "c_text_document"
    ).skipped == 1


def test_killed_with_kill_9_the_command_goes_on_and_ends_with_the_same_bytes(
    tmp_path, capsys
):
    """Killed while the first shards are written, its parent alone; then with one shard done; with two; then
    let be."""
    path = write_lines(tmp_path / "a.jsonl", corpus_lines(12_000))
    assert (
        run_tool(
            capsys,
            "preprocess_data",
            "--input",
            path,
            "--output-prefix",
            tmp_path / "want",
            *NULL_FLAGS,
        )[0]
        == 0
    )
    command = [
        sys.executable,
        str(TOOLS / "preprocess_data.py"),
        "--input",
        path,
        "--output-prefix",
        str(tmp_path / "c"),
        *NULL_FLAGS,
        *"--partitions 3 --workers 3".split(),
    ]
    kills = 0
    for moment in ("c_*.bin.partial", *["c_*_of_*.idx"] * 2, None):
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(TOOLS.parent)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wanted = kills or 1
        while (
            moment
            and process.poll() is None
            and len(list(tmp_path.glob(moment))) < wanted
        ):
            time.sleep(0.002)
        if moment and process.poll() is None:
            (os.killpg if kills else os.kill)(process.pid, signal.SIGKILL)
            kills += 1
            is_gone(process)
            assert not (
                tmp_path / "c_text_document.idx"
            ).exists()  # nothing that can be seen is half
    said = process.communicate(timeout=HUNG)[1].decode()
    assert process.returncode == 0 and kills, said
    assert bytes_of(tmp_path / "c_text_document") == bytes_of(
        tmp_path / "want_text_document"
    )
    check_sums(tmp_path / "c_text_document", read_record(tmp_path / "c_text_document"))
    assert not list(tmp_path.glob("c_*_of_*.idx"))


def is_gone(process):
    """Every process of the killed command's session is gone."""
    process.communicate(timeout=HUNG)
    deadline = time.monotonic() + HUNG
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("processes of the killed command are left")


def test_a_full_disk_is_an_error_and_nothing_is_kept(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", corpus_lines(3000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, hard)
    )  # writing on fails as on a full disk
    try:
        with pytest.raises(
            DataError, match="cannot write .*out_text_document.*(kept|room)"
        ):
            preprocess([path], str(tmp_path / "out"), NULL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_tokenizer_that_lies_about_its_size_is_an_error(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "9"}])

    def make():
        tokenizer = make_tokenizer("NullTokenizer", vocab_size=100)
        tokenizer.encode_batch = lambda texts: [[70000] for _ in texts]
        return tokenizer

    with pytest.raises(DataError, match="in lines 1 to 1: .* do not fit uint16"):
        preprocess([path], str(tmp_path / "out"), make)


class Words:
    """One id for each word: its length."""

    vocab_size = 50
    eod = 49
    fingerprint = "Words"

    def encode_batch(self, texts):
        return [[len(word) for word in text.split()] for text in texts]


def test_sentences_become_sequences_and_the_last_has_the_end(tmp_path):
    texts = ["Dr. Who came. He left again.", "", ["a bb", "", "ccc"]]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    splitter = learn_splitter(["Some words. More words."])
    preprocess(
        [path],
        str(tmp_path / "out"),
        Words,
        PreprocessOptions(append_eod=True, sentences=splitter),
    )
    corpus = IndexedDataset(tmp_path / "out_text_sentence")
    assert [s.tolist() for s in corpus] == [[3, 3, 5], [2, 4, 6, 49], [1, 2], [3, 49]]
    assert corpus.document_indices.tolist() == [0, 2, 2, 4]


def test_the_command_learns_from_the_text_how_to_split_it(tmp_path, capsys):
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] . prof who came left".split()
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "Prof. Who came.\n\nWho left."}, {"text": "Left."}],
    )
    argv = [
        "preprocess_data",
        "--input",
        path,
        "--split-sentences",
        "--tokenizer-type",
        "BertWordPieceLowerCase",
        "--vocab-file",
        tmp_path / "vocab.txt",
        "--output-prefix",
        tmp_path / "c",
    ]
    for flags, want in [
        ([], [[6, 5, 7, 8, 5], [7, 9, 5], [9, 5]]),
        (["--lang", "none"], [[6, 5], [7, 8, 5], [7, 9, 5], [9, 5]]),
        (
            ["--keep-newlines", "--append-eod"],
            [[6, 5, 7, 8, 5], [7, 9, 5, 3], [9, 5, 3]],
        ),
    ]:
        assert run_tool(capsys, *argv, *flags)[0] == 0
        assert [
            s.tolist() for s in IndexedDataset(tmp_path / "c_text_sentence")
        ] == want


def test_a_list_of_sentences_is_bad_where_sentences_are_not_wanted(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": ["a", "b"]}])
    with pytest.raises(DataError, match="'text' is list, not text"):
        preprocess([path], str(tmp_path / "out"), Words)


def test_what_is_seen_of_a_corpus_and_a_byte_that_changed(tmp_path, capsys):
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "1 2 3"}, {"text": ""}, {"text": "4"}, {"text": "5 6"}],
    )
    preprocess([path], str(tmp_path / "c"), NULL)
    prefix = tmp_path / "c_text_document"
    code, said = run_tool(
        capsys, "inspect_dataset", prefix, "--check", "--document", -1, *NULL_FLAGS[:4]
    )
    assert (
        code == 0
        and "4 documents, 3 sequences, 6 tokens of uint16" in said
        and "0 to 3, 1.5 on average" in said
    )
    assert (
        "none              1" in said
        and "2 to 3              2" in said
        and "[5 6] '5 6'" in said
    )
    assert (
        "all checksums are right" in said
        and "tokenizer NullTokenizer:100" in said
        and str(path) in said
    )
    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    data[3] ^= 1
    Path(f"{prefix}.bin").write_bytes(data)
    code, said = run_tool(capsys, "inspect_dataset", f"{prefix}.idx", "--check")
    assert code == 2 and "c_text_document.bin is damaged between bytes 0 and 12" in said
    Path(f"{prefix}.json").unlink()
    assert (
        "there are no checksums"
        in run_tool(capsys, "inspect_dataset", prefix, "--check")[1]
    )
    assert run_tool(capsys, "inspect_dataset", prefix, "--write-checksums", "--check")[
        1
    ].endswith("checksums are right\n")
    Path(f"{prefix}.bin").write_bytes(data[::-1])
    assert (
        run_tool(capsys, "inspect_dataset", prefix, "--write-checksums", "--check")[0]
        == 2
    )
    assert "0 to 3." in run_tool(capsys, "inspect_dataset", prefix, "--document", 4)[1]


def test_the_damaged_block_of_a_long_corpus_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(corpus_record, "PIECE_BYTES", 1000)
    monkeypatch.setattr(
        preprocessing, "read_blocks", partial(read_blocks, block_bytes=700)
    )
    paths = [write_lines(tmp_path / f"{i}.jsonl", corpus_lines(200)) for i in range(2)]
    for i, path in enumerate(paths):
        preprocess([path], str(tmp_path / "parts" / str(i)), NULL)
    merge = [
        "merge_datasets",
        "--input",
        tmp_path / "parts",
        "--output-prefix",
        tmp_path / "all",
    ]
    assert run_tool(capsys, *merge)[0] == 0
    whole = Path(tmp_path / "all.bin").read_bytes()
    pieces = read_record(tmp_path / "all").pieces
    assert (
        sum(piece.bytes for piece in pieces) == len(whole)
        and max(piece.bytes for piece in pieces) == 1000
    )
    starts = np.cumsum([0, *(piece.bytes for piece in pieces)])
    for at in (0, 999, 1000, len(whole) // 2, len(whole) - 1):
        Path(tmp_path / "all.bin").write_bytes(
            whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        )
        code, said = run_tool(capsys, "inspect_dataset", tmp_path / "all", "--check")
        low, high = starts[starts <= at][-1], starts[starts > at][0]
        assert (
            code == 2
            and f"all.bin is damaged between bytes {low:,} and {high:,}" in said
        )


class RayInAPocket(types.ModuleType):
    """The part of Ray that the driver uses; tasks run at once in this process."""

    def __init__(self):
        super().__init__("ray")
        self.asked = []

    def init(self, **options):
        self.asked.append(options)

    def remote(self, **options):
        self.asked.append(options)
        return lambda function: types.SimpleNamespace(
            remote=lambda *a: partial(function, *a)
        )

    def wait(self, waiting):
        return waiting[-1:], waiting[:-1]

    def get(self, ready):
        return [call() for call in ready]


def test_ray_makes_every_shard_once_and_tells_what_is_wrong(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", corpus_lines(50))
    with pytest.raises(ConfigError, match=r'pip install "megatron_ds\[ray\]"'):
        monkeypatch.setitem(sys.modules, "ray", None)
        next(run_on_ray(partial(preprocess, [path], str(tmp_path / "c"), NULL), 3))
    ray = RayInAPocket()
    monkeypatch.setitem(sys.modules, "ray", ray)
    run = partial(run_on_ray, address="auto", cores=2)
    preprocess([path], str(tmp_path / "one"), NULL)
    prefix, bad = str(tmp_path / "c"), str(tmp_path / "d")
    preprocess_in_shards(
        partial(preprocess, [path], prefix, NULL), 3, prefix, ["text"], run=run
    )
    assert bytes_of(tmp_path / "c_text_document") == bytes_of(
        tmp_path / "one_text_document"
    )
    assert ray.asked[0]["address"] == "auto" and ray.asked[1]["num_cpus"] == 2
    with pytest.raises(DataError, match="a.jsonl, line .*: no key 'body'"):
        preprocess_in_shards(
            partial(
                preprocess, [path], bad, NULL, PreprocessOptions(json_keys=["body"])
            ),
            2,
            bad,
            ["body"],
            run=run,
        )


def test_flags_that_do_not_go_together_are_told(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "1"}])
    base = [
        "preprocess_data",
        "--input",
        path,
        "--output-prefix",
        tmp_path / "c",
        *NULL_FLAGS,
    ]
    for flags, told in [
        (["--workers", 3, "--partitions", 2], "use --workers 4"),
        (["--shard-index", 1], "give --num-shards too"),
        (
            ["--partitions", 2, "--workers", 2, "--num-shards", 2],
            "give only one of them",
        ),
        (["--num-shards", 0], "positive"),
        (["--ray"], "--ray needs --num-shards"),
        (
            ["--ray", "local", "--num-shards", 2, "--shard-index", 0],
            "makes all of them",
        ),
        (["--keep-newlines"], "only apply with --split-sentences"),
        (["--num-shards", 2, "--shard-index", 2], "numbered 0 to 1"),
    ]:
        code, said = run_tool(capsys, *base, *flags)
        assert code == 2 and told in said and said.count("\n") == 1, (flags, said)
    assert preprocessing._tokenizer is None and json.loads(
        (tmp_path / "a.jsonl").read_text()
    ) == {"text": "1"}
    assert os.listdir(tmp_path) == ["a.jsonl"]
