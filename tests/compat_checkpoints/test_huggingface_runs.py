"""Runs that start from a folder of Hugging Face, and that continue: sizes, notes, family of an export."""

import json
import re
import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from megatron_ds.compat.conversion.formats import Wishes
from megatron_ds.compat.conversion.huggingface.format import (
    FORMAT as HUGGING_FACE,
)
from megatron_ds.compat.conversion.own_format import FORMAT as OURS
from megatron_ds.config import parse
from megatron_ds.errors import DataError
from megatron_ds.extensions.evaluation.checkpoint_model import evaluation_config
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.training.from_checkpoint import options_of_checkpoint
from megatron_ds.training.run_tokenizer import with_tokenizer
from tests.contracts.test_special_tokens import library_json
from tests.harness.huggingface_models import POSITIONS, saved
from tests.harness.pretraining import run_file, run_pretrain, train
from tests.harness.spoilers import in_a_folder_of_its_own

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="transformers is not installed")
STEP = [
    "--mock-data",
    "--micro-batch-size",
    1,
    "--global-batch-size",
    2,
    "--lr",
    1e-3,
    "--eval-iters",
    0,
]
SIZES = [
    "--num-layers",
    2,
    "--hidden-size",
    16,
    "--num-attention-heads",
    2,
    "--seq-length",
    8,
    "--vocab-size",
    50,
    *"--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope".split(),
    "--hidden-dropout",
    0,
    "--num-query-groups",
    1,
    "--ffn-hidden-size",
    32,
]


def exported(run, folder) -> dict:
    """config.json of the export of a run without --family."""
    HUGGING_FACE.write(OURS.read(run, Wishes()), folder, Wishes())
    return json.loads((folder / "config.json").read_text())


def test_a_run_from_opt_says_what_differs_and_is_exported_as_opt_also_when_it_was_continued(
    tmp_path,
):
    theirs = saved("opt", tmp_path / "theirs")
    (first,) = train(
        1, ["--load", theirs, "--save", tmp_path / "a", *STEP, "--train-iters", 1]
    )
    assert (
        f"--seq-length is {POSITIONS}, the number of positions in {theirs}" in first.out
    )
    assert (
        "settings of" in first.out and "pad_token_id 1: transformers gives" in first.out
    )
    assert exported(tmp_path / "a", tmp_path / "one")["model_type"] == "opt"
    (second,) = train(
        1,
        ["--load", tmp_path / "a", "--save", tmp_path / "b", *STEP, "--train-iters", 2],
    )
    assert "at iteration 1" in second.out or "iteration 1" in second.out
    config = exported(tmp_path / "b", tmp_path / "two")
    assert (
        config["model_type"] == "opt"
        and config["pad_token_id"] == 1
        and config["bos_token_id"] == 2
    )
    assert HUGGING_FACE.read(tmp_path / "two", Wishes()).source["family"] == "opt"


def test_a_run_continues_without_a_size_and_another_size_is_an_error_that_names_both(
    tmp_path,
):
    train(1, [*SIZES, *STEP, "--save", tmp_path / "run", "--train-iters", 1])
    (ended,) = train(
        1,
        [
            "--load",
            tmp_path / "run",
            "--save",
            tmp_path / "run",
            *STEP,
            "--train-iters",
            2,
        ],
    )
    assert "the checkpoint" in ended.out and "hidden_size 16" in ended.out
    before, after = (run_file(tmp_path / "run", step) for step in (1, 2))
    assert (
        after["identity"] == before["identity"] and after["run_id"] == before["run_id"]
    )
    for flags, told in (
        (["--hidden-size", 32], "hidden_size: checkpoint 16, this run 32"),
        (["--num-layers", 3], "num_layers: checkpoint 2, this run 3"),
    ):
        (ended,) = run_pretrain(
            1, ["--load", tmp_path / "run", *STEP, "--train-iters", 3, *flags]
        )
        assert ended.code == 2 and told in ended.err


def size_with(file, *words):
    """--vocab-size of a run whose --config is a run.json."""
    return parse(["--config", str(file), *map(str, (*STEP, *words))]).model.vocab_size


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_run_json_keeps_the_rows_of_its_model_with_and_without_a_tokenizer(
    tmp_path, has_tokenizer
):
    """NullTokenizer adds an end of document, which is one of the rows."""
    theirs = saved("llama", tmp_path / "theirs")
    library = json.dumps(library_json(("</s>",)))
    (tmp_path / "tokenizer.json").write_text(library)
    if has_tokenizer:
        (theirs / "tokenizer.json").write_text(library)
    found = HUGGING_FACE.read(theirs, Wishes())
    OURS.write(found, tmp_path / "ours", Wishes())
    file = next((tmp_path / "ours").glob("iter_*/run.json"))
    rows = found.model["vocab_size"]
    words = ["--train-iters", 1, "--save", tmp_path / "run"]
    assert size_with(file, *words) == rows - 1
    (ended,) = run_pretrain(1, ["--config", file, *STEP, *words])
    if has_tokenizer:
        assert ended.code == 2 and "tokenizer.fingerprint: checkpoint" in ended.err
        assert "with these positions" not in ended.err
        return
    assert ended.code == 0 and f"loaded {tmp_path / 'ours'}" in ended.out, ended.err
    # The run.json of that run has NullTokenizer, and other tokenizers have no such token.
    file = tmp_path / "run" / "iter_0000001" / "run.json"
    assert size_with(file) == rows - 1
    assert size_with(file, "--vocab-size", 5) == 5
    own = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", tmp_path]
    config = parse(["--config", str(file), *map(str, own)])
    config, tokenizer = with_tokenizer(config)
    assert config.model.vocab_size == rows > tokenizer.vocab_size


@pytest.mark.parametrize("words, tokens", [([], 0), (["--tokenizer-type", "x"], 1)])
def test_a_conversion_without_a_tokenizer_has_the_rows_of_its_source(
    tmp_path, words, tokens
):
    """NullTokenizer adds an end of document, which is one of the rows."""
    theirs = saved("llama", tmp_path / "theirs")
    for file in theirs.glob("token*"):
        file.unlink()
    found = HUGGING_FACE.read(theirs, Wishes())
    lines = OURS.write(found, tmp_path / "ours", Wishes())
    assert "the text of a token is its number" in "".join(lines)
    rows = found.model["vocab_size"]
    given = options_of_checkpoint(["--load", str(tmp_path / "ours"), *words])
    (size,) = [s.value for s in given if s.path == "model.vocab_size"]
    assert size == rows - 1 + tokens
    if not words:
        flags = ["--load", str(tmp_path / "ours")]
        config, tokenizer = with_tokenizer(evaluation_config(flags, Launch()))
        assert config.model.vocab_size == tokenizer.vocab_size == rows
        with pytest.raises(DataError, match="--tokenizer-type"):
            tokenizer.encode("Hello")


def test_ranks_whose_copies_of_a_folder_hold_other_weights_end_and_name_the_tensor(
    tmp_path,
):
    saved("opt", tmp_path / "node0" / "theirs")
    shutil.copytree(tmp_path / "node0", tmp_path / "node1")
    argv = ["--load", "theirs", *STEP, "--train-iters", 1]
    spoil = partial(in_a_folder_of_its_own, folder=tmp_path)
    train(2, argv, spoil=spoil)
    # One value of one tensor.
    [path] = (tmp_path / "node1" / "theirs").glob("*.safetensors")
    tensors = load_file(path)
    [name] = [name for name in tensors if name.endswith("layers.1.fc2.weight")]
    tensors[name][3, 5] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    ended = run_pretrain(2, argv, spoil=spoil)
    printed = "".join(rank.out + rank.err for rank in ended)
    assert [rank.code for rank in ended] == [2, 2], printed
    assert re.search(
        r"ranks of this job load different weights: weight/decoder\.layers\.1\.mlp\.linear_fc2\.weight is \S+ \S+ "
        r"torch\.float32, hash \S+ on rank 0 on \S+ \(from .*\), and",
        printed,
    )
