"""The tokenizer lies beside the checkpoints: text is generated from any folder, after the original is
gone."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ds.checkpoint.tokenizer_files import keep_tokenizer_files, local_copies
from megatron_ds.cli import main_guard
from megatron_ds.config import parse
from megatron_ds.config.saved_values import to_dict
from megatron_ds.data.tokenizers import TOKENIZERS, build_tokenizer
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.corpora.vocabulary_training import train_byte_level_bpe
from megatron_ds.extensions.generation import generate_text
from tests.harness.pretraining import MOCK, run_file, train

pytestmark = pytest.mark.processes

BPE = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
FILES = (
    "--tokenizer-type GPT2BPETokenizer --vocab-file tok/vocab.json "
    "--merge-file tok/merges.txt"
).split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a tokenizer in tok and another one in other."""
    monkeypatch.chdir(tmp_path)
    train_byte_level_bpe(["the theory of the thing " * 9], 270, "tok")
    train_byte_level_bpe(["other words, other other words " * 9], 270, "other")
    return tmp_path


def flags_of(tokenizer):
    at = MOCK.index("--tokenizer-type")
    vocabulary = MOCK.index("--vocab-size")
    kept = [
        word
        for i, word in enumerate(MOCK)
        if i not in (at, at + 1, vocabulary, vocabulary + 1)
    ]
    return [*kept, *tokenizer]


def generated(capsys, *argv):
    """(exit code, what is printed) of the tool."""
    words = [str(word) for word in argv]
    code = main_guard(lambda: generate_text.run_tool(words))
    said = capsys.readouterr()
    return code, said.out + said.err


def test_text_is_generated_from_another_folder_after_the_tokenizer_is_gone(
    here, monkeypatch, capsys
):
    train(
        1,
        [
            *flags_of([*BPE, str(here / "tok")]),
            "--train-iters",
            "3",
            "--save",
            str(here / "saved"),
        ],
    )
    assert run_file("saved", 3)["tokenizer_files"].keys() == {"tokenizer_model"}
    os.makedirs("elsewhere/other")
    monkeypatch.chdir("elsewhere")
    shutil.move(here / "tok", here / "moved")
    ask = [
        "--load",
        here / "saved",
        "--prompt",
        "the",
        "--max-new-tokens",
        3,
        "--greedy",
    ]
    code, text = generated(capsys, *ask)
    assert code == 0 and text.startswith("the")
    assert generated(capsys, *ask, "--tokenizer-model", here / "moved") == (code, text)
    code, told = generated(capsys, *ask, "--tokenizer-model", here / "other")
    assert code == 2 and "tokenizer.fingerprint: checkpoint" in told
    code, told = generated(
        capsys, "--load", here / "saved" / "iter_0000003", "--prompt", "the"
    )
    assert code == 2 and f"Use --load {here / 'saved'} --iteration 3." in told
    for copy in (here / "saved").glob("tokenizer-*"):
        shutil.rmtree(copy)
    code, told = generated(capsys, *ask)
    assert code == 2 and f"--tokenizer-model {here / 'tok'}: there is no such" in told


def kept_tokenizer(run, config):
    """The tokenizer of the copies that run.json names."""
    copies = local_copies(Path("saved"), run)
    return build_tokenizer(replace(config.data, **copies), config.model)


def run_of(flags, tokenizer=None):
    """(config, what run.json would hold) of a run with these flags."""
    config = parse(
        [*flags_of(flags), "--save", "saved"], known={"data.tokenizer_type": TOKENIZERS}
    )
    tokenizer = tokenizer or build_tokenizer(config.data, config.model)
    run = {
        "config": to_dict(config),
        "identity": {"tokenizer": {"fingerprint": tokenizer.fingerprint}},
    }
    return config, json.loads(json.dumps(run | keep_tokenizer_files(config)))


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags",
    [[*BPE, "tok"], [*BPE, "tok/tokenizer.json"], FILES],
    ids=["folder", "file", "two files"],
)
def test_the_copy_is_the_same_tokenizer_and_is_made_once(here, flags):
    Path("tok/tokenizer_config.json").write_text('{"eos_token": "th"}')
    Path("tok/model.safetensors").write_text("weights")
    config, run = run_of(flags)
    original = build_tokenizer(config.data, config.model)
    (copy,) = Path("saved").iterdir()
    times = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert (
        run_of(flags)[1] == run
        and {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == times
    )
    assert not list(copy.rglob("*.safetensors"))
    shutil.rmtree("tok")
    kept = kept_tokenizer(run, config)
    assert (kept.fingerprint, kept.eod, kept.vocab_size) == (
        original.fingerprint,
        original.eod,
        original.vocab_size,
    )
    assert kept.encode("the theory") == original.encode("the theory")


def test_a_damaged_copy_is_written_again_and_another_tokenizer_gets_a_folder_of_its_own(
    here,
):
    config, run = run_of([*BPE, "tok"])
    (copy,) = Path("saved").rglob("tokenizer.json")
    copy.write_text("{}")
    run_of([*BPE, "tok"])
    assert copy.read_bytes() == Path("tok/tokenizer.json").read_bytes()
    other_config, other = run_of([*BPE, "other"])
    assert len(os.listdir("saved")) == 2
    assert (
        kept_tokenizer(run, config).fingerprint
        != kept_tokenizer(other, other_config).fingerprint
    )


def test_a_tokenizer_without_files_needs_none(here):
    config, run = run_of(["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"])
    assert "tokenizer_files" not in run and not Path("saved").exists()
    assert kept_tokenizer(run, config).vocab_size == 10


@pytest.mark.parametrize("path", ["../tok", "/etc/passwd", "a/../../tok", 3])
def test_a_run_file_cannot_name_files_outside_its_folder(here, path):
    config, run = run_of([*BPE, "tok"])
    with pytest.raises(CheckpointError, match="is not a table of paths in that folder"):
        kept_tokenizer(run | {"tokenizer_files": {"tokenizer_model": path}}, config)
