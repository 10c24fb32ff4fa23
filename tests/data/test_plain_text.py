"""Plain text and folders as input: what a document is, wherever a file is cut, and what damaged files get."""

import gzip
import itertools
import os

import pytest

from megatron_ds.data.tokenizers.base import flat
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora import plain_text, vocabulary_training
from megatron_ds.extensions.corpora.plain_text import TextCut
from megatron_ds.extensions.corpora.preprocess_data import main as preprocess
from megatron_ds.extensions.corpora.text_files import (
    FileSlice,
    check_files,
    files_of,
    read_blocks,
    slices_of_shard,
    texts_of,
)
from megatron_ds.extensions.corpora.text_records import place_of
from megatron_ds.extensions.tokenizers.backend import CHECKED_BYTES, CheckedBackend

pytestmark = pytest.mark.plan

FILE, PARAGRAPHS, LINES, MARKED = (
    TextCut(),
    TextCut("paragraph"),
    TextCut("line"),
    TextCut(separator="---"),
)
TEXT = "One\ngröße\n\n\n \nTwo\n---\nthree\r\n\r\nFour\n\n---\n\nfive"
WANTED = {
    FILE: ["One\ngröße\n\n\n \nTwo\n---\nthree\n\nFour\n\n---\n\nfive"],
    PARAGRAPHS: ["One\ngröße", "Two\n---\nthree", "Four", "---", "five"],
    LINES: ["One", "größe", "Two", "---", "three", "Four", "---", "five"],
    MARKED: ["One\ngröße\n\n\n \nTwo", "three\n\nFour", "\nfive"],
}


def read(slices, cut, block_bytes=10):
    """The documents of slices; in small blocks."""
    blocks = itertools.chain.from_iterable(
        read_blocks(
            piece.path, block_bytes, start=piece.start, stop=piece.stop, cut=cut
        )
        for piece in slices
    )
    found = [texts_of(block, ["text"]) for block in blocks]
    assert not any(bad for _, bad in found)
    return [text for (texts,), _ in found for text in texts]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


@pytest.mark.parametrize("cut", WANTED, ids=lambda cut: cut.separator or cut.where)
def test_a_text_file_is_cut_into_documents(tmp_path, cut):
    assert read([FileSlice(write(tmp_path / "a.txt", TEXT))], cut) == WANTED[cut]
    assert (
        read(
            [FileSlice(write(tmp_path / "a.md.gz", gzip.compress(TEXT.encode())))], cut
        )
        == WANTED[cut]
    )


@pytest.mark.parametrize(
    "cut", [PARAGRAPHS, LINES, MARKED], ids=lambda cut: cut.separator or cut.where
)
def test_slices_hold_each_document_once_wherever_the_cuts_are(tmp_path, cut):
    path = write(tmp_path / "a.txt", TEXT)
    size = os.path.getsize(path)
    for first, second in itertools.combinations_with_replacement(range(size + 1), 2):
        edges = [(0, first), (first, second), (second, size)]
        pieces = [FileSlice(path, *edge) for edge in edges if edge[0] < edge[1]]
        assert read(pieces, cut) == WANTED[cut], (first, second)


@pytest.mark.parametrize("cut", WANTED, ids=lambda cut: cut.separator or cut.where)
def test_shards_in_order_are_the_files_in_order(tmp_path, cut):
    paths = [
        write(tmp_path / "a.txt", TEXT),
        write(tmp_path / "b.jsonl", '{"text": "6"}\n{"text": "7"}\n'),
        write(tmp_path / "c.txt", ""),
        write(tmp_path / "d.txt", TEXT),
    ]
    for count in (1, 2, 3, 7, 200):
        shards = [slices_of_shard(paths, ["text"], i, count, cut) for i in range(count)]
        found = [text for shard in shards for text in read(shard, cut)]
        assert found == [*WANTED[cut], "6", "7", *WANTED[cut]]
        assert sum(bool(shard) for shard in shards) > (count > 1)


@pytest.mark.parametrize(
    "data, found",
    [
        (b"", []),
        (b"\n \r\n\t\n", []),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbfText\n", ["Text"]),
        (b"a\r\nb\r\n", ["a\nb"]),
        (b"\xef\xbb\xbf\nText", ["\nText"]),
        (b"no line end", ["no line end"]),
        (b'{"no": "key of ours"}', ['{"no": "key of ours"}']),
    ],
    ids=[
        "empty",
        "blank",
        "mark",
        "mark and text",
        "CR LF",
        "mark and line",
        "no end",
        "JSON",
    ],
)
def test_marks_and_line_ends_are_no_part_of_a_text(tmp_path, data, found):
    assert read([FileSlice(write(tmp_path / "a.txt", data))], FILE) == found


@pytest.mark.parametrize("cut", WANTED, ids=lambda cut: cut.separator or cut.where)
def test_text_that_is_not_utf8_is_reported_by_its_line_in_the_file(tmp_path, cut):
    path = write(tmp_path / "a.txt", TEXT.encode() + b"\nsix\n\nse\xffven\n")
    size = os.path.getsize(path)
    for start in (0, 20, 40):
        starts = [start] if cut.is_whole else sorted({0, start})
        blocks = [
            block
            for low, high in zip(starts, [*starts[1:], size])
            for block in read_blocks(
                path, 10, start=0 if cut.is_whole else low, stop=high, cut=cut
            )
        ]
        bad = [str(bad) for block in blocks for bad in texts_of(block, ["text"])[1]]
        assert bad == [f"{path}, line 17: not UTF-8 at byte 2"]
    assert place_of(blocks[-1]).endswith("17")


@pytest.mark.parametrize(
    "data, told",
    [
        (
            "\ufeffText".encode("utf-16-le"),
            "a.txt is text in UTF-16, and only UTF-8 is read. Convert it: iconv",
        ),
        (
            b'{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n',
            "a.txt holds JSON lines.* key 'text'.* Rename it",
        ),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path, data, told):
    with pytest.raises(DataError, match=told):
        read([FileSlice(write(tmp_path / "a.txt", data))], FILE)


def test_a_document_too_long_for_memory_is_an_error_naming_its_line(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(plain_text, "LONGEST_BYTES", 30)
    path = write(tmp_path / "a.txt", "short\n\n" + "long\n" * 7)
    with pytest.raises(
        DataError,
        match="a.txt: the document that begins in line 3 is longer .*--text-documents",
    ):
        read([FileSlice(path)], PARAGRAPHS)
    with pytest.raises(DataError, match="line 1 is longer"):
        read([FileSlice(path)], FILE)
    assert len(read([FileSlice(path)], LINES)) == 8


def test_a_folder_is_its_text_files_by_path(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in (
        "b/1.txt",
        "b/2.TXT",
        "a.md",
        "b.txt",
        "c.jsonl",
        "d.parquet",
        "e.txt.gz",
        "b/.hidden.txt",
        ".git/x.txt",
        "cover.jpg",
        "b/corpus.json",
        "tokenizer/merges.txt",
        "tokenizer/tokenizer.json",
        "x.gz",
    ):
        write(tmp_path / "books" / name, "text")
    found = files_of([str(tmp_path / "books"), "last.txt"])
    names = [os.path.relpath(path, tmp_path / "books") for path in found[:-1]]
    assert (
        names
        == ["a.md", "b/1.txt", "b/2.TXT", "b.txt", "c.jsonl", "d.parquet", "e.txt.gz"]
        and found[-1] == "last.txt"
    )
    assert (
        "4 .txt" not in caplog.text
        and "3 .txt" in caplog.text
        and "3 other files are left out" in caplog.text
    )
    os.mkdir(tmp_path / "none")
    with pytest.raises(
        DataError,
        match="none: this folder has no text. Of a folder, files whose names end in .txt",
    ):
        files_of([str(tmp_path / "none")])


def test_a_text_file_that_becomes_one_document_is_reported(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write(tmp_path / "a.txt", "1 2\n3\n")
    words = ["--input", path, "--output-prefix", str(tmp_path / "a")]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert preprocess(words) == 0
    assert f"1 files of plain text, such as {path}, became one document" in caplog.text
    caplog.clear()
    assert preprocess([*words, "--text-documents", "line"]) == 0
    assert "became one document" not in caplog.text


def test_plain_text_has_one_key(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    check_files([path], ["body"])
    with pytest.raises(
        DataError, match="--json-keys text title: .*a.txt is plain text"
    ):
        check_files([path], ["text", "title"])


def test_a_long_text_is_learned_from_in_pieces_that_are_the_whole(monkeypatch):
    monkeypatch.setattr(vocabulary_training, "PIECE", 10)
    for text in (
        "",
        "short",
        "a longer text, cut at  its blanks\nand lines",
        "x" * 35,
        "y" * 10 + " " + "z" * 25,
    ):
        pieces = list(vocabulary_training._pieces(text))
        assert "".join(pieces) == text and all(len(piece) <= 10 for piece in pieces)
    assert pieces[:2] == ["y" * 10, " " + "z" * 9]


def test_of_a_long_text_only_the_beginning_is_encoded_twice():
    lengths = []

    def library(texts):
        lengths.extend(map(len, texts))
        return [list(text.encode()) for text in texts]

    backend = CheckedBackend(
        "native", lambda texts: flat([list(text.encode()) for text in texts]), library
    )
    ids, sizes = backend(["ab", "c" * 10 * CHECKED_BYTES, "d"])
    assert len(ids) == sum(sizes) == 10 * CHECKED_BYTES + 3 and lengths == [
        2,
        CHECKED_BYTES - 2,
    ]
