"""From text to `.bin/.idx` by the tools, as a user runs them; and what bad lines get."""

import gzip
import hashlib
import json
import os
import subprocess
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.text.indexed import IndexedDataset
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.corpora import preprocess as preprocessing
from megatron_ds.extensions.corpora.preprocess import PreprocessOptions, preprocess
from megatron_ds.extensions.corpora.text_files import read_blocks
from tests.harness.limits import HUNG
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

TOOLS = Path(__file__).parents[2] / "tools"
NULL = partial(make_tokenizer, "NullTokenizer", vocab_size=100)


def run_tool(capsys, name, *argv):
    """(exit code, what it said) of a tool, run in this process."""
    code = import_module(f"megatron_ds.extensions.corpora.{name}").main(
        [str(a) for a in argv]
    )
    said = capsys.readouterr()
    return code, said.out + said.err


def write_lines(path, lines):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as f:
        f.writelines(
            line if isinstance(line, bytes) else (json.dumps(line) + "\n").encode()
            for line in lines
        )
    return str(path)


def documents_of(prefix):
    corpus = IndexedDataset(prefix)
    corpus.check()
    bounds = corpus.document_indices.tolist()
    return [
        [t for i in range(*b) for t in corpus[i].tolist()]
        for b in zip(bounds, bounds[1:])
    ]


def test_each_line_becomes_a_document_with_its_end(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "1 2 3"}, {"text": ""}, b"\n", {"text": "4", "more": 1}],
    )
    written = preprocess(
        [path], str(tmp_path / "out"), NULL, PreprocessOptions(append_eod=True)
    )
    assert documents_of(tmp_path / "out_text_document") == [
        [1, 2, 3, 100],
        [],
        [4, 100],
    ]
    assert (written.documents, written.tokens, written.bad) == (3, 6, [])
    preprocess([path], str(tmp_path / "out"), NULL)
    assert documents_of(tmp_path / "out_text_document") == [[1, 2, 3], [], [4]]


@pytest.mark.quick
def test_the_output_is_the_golden_one(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": "3"}])
    preprocess([path], str(tmp_path / "out"), NULL)
    assert (tmp_path / "out_text_document.bin").read_bytes().hex() == "010002000300"
    assert (tmp_path / "out_text_document.idx").read_bytes().hex() == (
        "4d4d49444944580000"
        "0100000000000000"
        "08"
        "0200000000000000"
        "0300000000000000"
        "02000000"
        "01000000"
        "0000000000000000"
        "0400000000000000"
        "0000000000000000"
        "0100000000000000"
        "0200000000000000"
    )


def test_several_files_and_keys_plain_and_gzipped(tmp_path):
    paths = [
        write_lines(tmp_path / "a.jsonl", [{"text": "1", "title": "2 3"}]),
        write_lines(
            tmp_path / "b.jsonl.gz",
            [{"text": "4 5", "title": ""}, {"text": "6", "title": "7"}],
        ),
    ]
    seen = []
    preprocess(
        paths,
        str(tmp_path / "out"),
        NULL,
        PreprocessOptions(json_keys=["text", "title"]),
        progress=lambda path, position, written: seen.append(
            (path, position, written.documents)
        ),
    )
    assert documents_of(tmp_path / "out_text_document") == [[1], [4, 5], [6]]
    assert documents_of(tmp_path / "out_title_document") == [[2, 3], [], [7]]
    assert seen == [
        (paths[0], os.path.getsize(paths[0]), 1),
        (paths[1], os.path.getsize(paths[1]), 3),
    ]


def test_blocks_are_whole_lines_with_their_numbers(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "1 " * n} for n in range(40)])
    blocks = list(read_blocks(path, block_bytes=100))
    lines = [line for block in blocks for line in block.contents]
    assert b"".join(lines) == Path(path).read_bytes() and len(blocks) > 5
    assert [number for block in blocks for number in block.numbers] == list(
        range(1, len(lines) + 1)
    )


BAD = [
    (b'{"text": "1"\n', "not JSON"),
    (b'{"text": "\xff"}\n', "not UTF-8 at byte 10"),
    (b'{"body": "1"}\n', "no key 'text'"),
    (b'{"text": 3}\n', "is int, not text"),
    (b'["1"]\n', "a JSON list"),
    (b'{"text": "\\ud83d"}\n', "surrogate"),
    (b"[" * 100_000 + b"\n", "nested too deep"),
]


@pytest.mark.parametrize("line, told", BAD, ids=[told for _, told in BAD])
def test_a_bad_line_is_an_error_with_file_and_number_and_nothing_is_written(
    tmp_path, line, told
):
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": "1"}, {"text": "2"}, line, {"text": "3"}]
    )
    with pytest.raises(DataError, match=told) as e:
        preprocess([path], str(tmp_path / "out"), NULL)
    assert f"{path}, line 3: " in str(e.value) and "--skip-bad-lines" in str(e.value)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    written = preprocess(
        [path], str(tmp_path / "out"), NULL, PreprocessOptions(skip_bad_lines=True)
    )
    assert (
        documents_of(tmp_path / "out_text_document") == [[1], [2], [3]]
        and len(written.bad) == 1
    )


def test_an_error_leaves_the_output_of_an_earlier_run_as_it_was(tmp_path):
    good, bad = (
        write_lines(tmp_path / "a.jsonl", [{"text": "1"}]),
        write_lines(tmp_path / "b.jsonl", [b"x\n"]),
    )
    preprocess([good], str(tmp_path / "out"), NULL)
    with pytest.raises(DataError):
        preprocess([bad], str(tmp_path / "out"), NULL)
    assert documents_of(tmp_path / "out_text_document") == [[1]]


@pytest.mark.parametrize(
    "lines, told",
    [([], "has no documents[.]"), ([b"x\n"], "no documents, only bad lines")],
)
def test_nothing_to_write_is_an_error(tmp_path, lines, told):
    with pytest.raises(DataError, match=told):
        preprocess(
            [write_lines(tmp_path / "a.jsonl", lines)],
            str(tmp_path / "out"),
            NULL,
            PreprocessOptions(skip_bad_lines=True),
        )
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_gzip_file_cut_short_is_an_error(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl.gz", [{"text": f"{n % 90}"} for n in range(3000)]
    )
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(DataError, match="is damaged after line"):
        preprocess([path], str(tmp_path / "out"), NULL)
    (tmp_path / "b.jsonl.gz").write_bytes(b'{"text": "1"}\n')
    with pytest.raises(DataError, match="b.jsonl.gz is damaged"):
        preprocess([str(tmp_path / "b.jsonl.gz")], str(tmp_path / "out"), NULL)


def test_a_wide_vocabulary_gets_wide_tokens(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "70000 3"}])
    preprocess(
        [path],
        str(tmp_path / "out"),
        partial(make_tokenizer, "NullTokenizer", vocab_size=80000),
    )
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.int32


def test_several_workers_write_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(
        preprocessing, "read_blocks", partial(read_blocks, block_bytes=200)
    )  # many blocks
    random = np.random.RandomState(3)
    lines = [
        {"text": " ".join(map(str, random.randint(0, 100, random.randint(0, 30))))}
        for _ in range(300)
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    for name, workers in [("one", 1), ("two", 2)]:
        preprocess(
            [path],
            str(tmp_path / name),
            NULL,
            PreprocessOptions(append_eod=True),
            workers=workers,
        )
    for end in ("bin", "idx"):
        one, two = (
            (tmp_path / f"{name}_text_document.{end}").read_bytes()
            for name in ("one", "two")
        )
        assert one == two and len(one) > 1000


def test_the_three_tools_lead_from_pythons_documentation_to_a_corpus(tmp_path):
    def tool(name, *argv):
        return subprocess.run(
            [warm_python(), TOOLS / f"{name}.py", *map(str, argv)],
            cwd=tmp_path,
            text=True,
            timeout=HUNG,
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(TOOLS.parent)},
        )

    tool("build_corpus", "--output", "corpus.jsonl")
    tool(
        "train_tokenizer",
        "--input",
        "corpus.jsonl",
        "--vocab-size",
        1000,
        "--output",
        "tok",
    )
    said = tool(
        "preprocess_data",
        "--input",
        "corpus.jsonl",
        "--output-prefix",
        "c",
        "--append-eod",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        "tok",
        "--log-interval",
        500,
    ).stderr
    texts = [
        json.loads(line)["text"]
        for line in open(tmp_path / "corpus.jsonl", encoding="utf-8")
    ]
    assert (
        len(texts) > 500
        and sum(map(len, texts)) > 500_000
        and len(set(texts)) == len(texts)
    )
    assert f"{len(texts):,} documents" in said
    tokenizer = make_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(tmp_path / "tok" / "vocab.json"),
        merge_file=str(tmp_path / "tok" / "merges.txt"),
    )
    assert tokenizer.vocab_size == 1000 and tokenizer.eod == 0
    corpus = IndexedDataset(tmp_path / "c_text_document")
    assert len(corpus) == len(texts)
    for i in (0, 7, len(texts) - 1):
        *ids, end = corpus[i].tolist()
        assert tokenizer.decode(ids) == texts[i] and end == tokenizer.eod
        assert tokenizer.encode(texts[i]) == ids  # both tokenizer types, the same ids


def test_training_a_tokenizer_twice_gives_the_same_files(tmp_path, capsys):
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "the theory of the thing, " * 5}, {"text": "other things in there"}],
    )
    hashes = set()
    for _ in range(2):
        code, _ = run_tool(
            capsys,
            "train_tokenizer",
            "--input",
            path,
            "--vocab-size",
            270,
            "--output",
            tmp_path / "tok",
        )
        hashes.add(
            hashlib.sha256(
                b"".join(p.read_bytes() for p in sorted((tmp_path / "tok").iterdir()))
            ).hexdigest()
        )
    assert code == 0 and len(hashes) == 1
    assert sorted(os.listdir(tmp_path / "tok")) == [
        "merges.txt",
        "tokenizer.json",
        "vocab.json",
    ]


def test_what_is_wrong_on_the_command_line_is_one_paragraph_and_exit_code_2(
    tmp_path, capsys
):
    good = write_lines(tmp_path / "a.jsonl", [{"text": "7"}])
    blank = write_lines(tmp_path / "blank.jsonl", [{"text": " "}])
    null = [
        *"--tokenizer-type NullTokenizer --vocab-size 9".split(),
        "--output-prefix",
        tmp_path / "out",
    ]
    cases = [
        (
            "preprocess_data",
            ["--input", tmp_path / "none.jsonl", *null],
            "none.jsonl: there is no such file",
        ),
        (
            "preprocess_data",
            ["--input", good, *null, "--worker", "2"],
            "did you mean '--workers'",
        ),
        (
            "preprocess_data",
            ["--input", good, *null, "--workers", "0"],
            "--workers 0: use a positive number",
        ),
        (
            "preprocess_data",
            ["--input", good, *null, "--json-keys", "text", "text"],
            "a key is named twice",
        ),
        (
            "preprocess_data",
            [
                "--input",
                good,
                "--output-prefix",
                tmp_path / "out",
                "--tokenizer-type",
                "NulTokenizer",
            ],
            "did you mean 'NullTokenizer'",
        ),
        (
            "preprocess_data",
            [
                "--input",
                good,
                "--output-prefix",
                tmp_path / "out",
                "--tokenizer-type",
                "GPT2BPETokenizer",
            ],
            "GPT2BPETokenizer needs --vocab-file and --merge-file. ",
        ),
        (
            "preprocess_data",
            ["--inputs", good, *null],
            "unknown flag --inputs; did you mean '--input'?",
        ),
        (
            "preprocess_data",
            null,
            "the following arguments are required: --input. --help",
        ),
        (
            "preprocess_data",
            ["--input", good, *null, "--workers", "many"],
            "--workers: invalid int value: 'many'",
        ),
        (
            "preprocess_data",
            [
                "--input",
                good,
                *null,
                *"--text-documents line --text-separator -".split(),
            ],
            "give only one",
        ),
        (
            "preprocess_data",
            ["--input", good, *null[:2], "--vocab-size", "1", *null[4:]],
            "a.jsonl, in lines 1 to 1: ",
        ),
        (
            "preprocess_data",
            ["--input", good, *null[:-1], tmp_path / "a.jsonl" / "out"],
            "cannot write",
        ),
        (
            "train_tokenizer",
            ["--input", good, "--vocab-size", "200", "--output", tmp_path / "t"],
            "need 257 ids",
        ),
        (
            "train_tokenizer",
            [
                "--input",
                good,
                "--vocab-size",
                "300",
                "--output",
                tmp_path / "t",
                "--json-keys",
                "body",
            ],
            "a.jsonl, line 1: no key 'body'",
        ),
        (
            "train_tokenizer",
            [
                "--input",
                tmp_path / "none",
                "--vocab-size",
                "300",
                "--output",
                tmp_path / "t",
            ],
            "no such file",
        ),
        (
            "train_tokenizer",
            ["--input", good, "--vocab-size", "300", "--output", good],
            "cannot write",
        ),
        (
            "train_tokenizer",
            ["--input", blank, "--vocab-size", "300", "--output", tmp_path / "t"],
            "hold no text",
        ),
        ("build_corpus", ["--output", tmp_path / "a.jsonl" / "c"], "cannot be written"),
    ]
    for tool, argv, told in cases:
        code, said = run_tool(capsys, tool, *argv)
        assert code == 2 and told in said and "Traceback" not in said, (
            tool,
            argv,
            said,
        )
        assert said.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "blank.jsonl"]
