"""Options that a run takes from the checkpoint of --load: model and tokenizer, unless others are given."""

import pytest

from megatron_ds.checkpoint.load import read_run
from megatron_ds.compat.conversion.own_format import source_in
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.tokenizers.file_tokenizers import WORD_PIECE_TOKENS
from megatron_ds.training import from_checkpoint
from megatron_ds.training.from_checkpoint import options_of_checkpoint
from tests.compat_checkpoints.test_huggingface_damage import LLAMA, convert, written

pytestmark = pytest.mark.plan

STEP = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]


def values_of(words):
    return {setting.path: setting.value for setting in options_of_checkpoint(words)}


def test_options_of_a_checkpoint_have_the_rows_that_no_token_uses(tmp_path):
    source = written(tmp_path / "in")
    (source / "vocab.txt").write_text("\n".join((*WORD_PIECE_TOKENS, "a", "b")))
    convert(source, tmp_path / "ours")
    words = ["--load", str(tmp_path / "ours"), "--use-checkpoint-args", "--mock-data"]
    settings = options_of_checkpoint(words)
    assert {setting.path: setting.value for setting in settings}[
        "model.vocab_size"
    ] == LLAMA["vocab_size"]
    config = parse(
        [*words, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"],
        settings=settings,
    )
    assert (
        config.data.tokenizer_type == "BertWordPieceLowerCase"
        and config.model.vocab_size == 11
    )


def test_a_checkpoint_gives_its_activation_also_where_it_is_the_default_of_other_options(
    tmp_path, monkeypatch
):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    run = read_run(tmp_path / "ours", 0)
    run["config"]["model"]["activation"] = "gelu"
    monkeypatch.setattr(from_checkpoint, "read_run", lambda *_: run)
    words = ["--load", str(tmp_path / "ours"), "--use-checkpoint-args", "--mock-data"]
    config = parse(
        [*words, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"],
        settings=options_of_checkpoint(words),
    )
    assert not config.model.add_bias_linear and config.model.activation == "gelu"


def test_options_come_without_a_flag_and_the_tokenizer_from_its_copies_or_from_flags_alone(
    tmp_path,
):
    source = written(tmp_path / "in")
    (source / "vocab.txt").write_text("\n".join((*WORD_PIECE_TOKENS, "a", "b")))
    convert(source, tmp_path / "ours")
    words = ["--load", str(tmp_path / "ours"), "--mock-data"]
    values = values_of(words)
    assert values["model.num_layers"] == 2 and values["data.vocab_file"] == str(
        source / "vocab.txt"
    )
    (source / "vocab.txt").unlink()
    config = parse([*words, *STEP], settings=options_of_checkpoint(words))
    assert config.model.hidden_size == 8 and config.data.vocab_file.startswith(
        str(tmp_path / "ours")
    )
    other = values_of([*words, "--tokenizer-type", "NullTokenizer"])
    assert (
        not any(path.startswith("data.") for path in other)
        and other["model.hidden_size"] == 8
    )


def test_a_checkpoint_without_options_is_an_error_only_where_they_are_asked_for(
    tmp_path, monkeypatch
):
    convert(written(tmp_path / "in"), tmp_path / "ours")
    monkeypatch.setattr(from_checkpoint, "read_run", lambda *_: {"engine": {}})
    words = ["--load", str(tmp_path / "ours")]
    assert options_of_checkpoint(words) == []
    with pytest.raises(CheckpointError, match="no options of a training run"):
        options_of_checkpoint([*words, "--use-checkpoint-args"])
    assert (
        options_of_checkpoint(["--load", str(tmp_path / "none")])
        == options_of_checkpoint([])
        == []
    )


@pytest.mark.parametrize(
    "source",
    [5, {"family": "opt", "settings": 5}, {"family": "opt", "generation": [1]}],
)
def test_a_damaged_record_of_the_source_is_one_error(source):
    with pytest.raises(
        CheckpointError, match="trained_from is not a table of settings"
    ):
        source_in({"trained_from": source})
