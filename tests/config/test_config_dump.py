"""The report, run.json, docs/reference/flags.md, and how a command ends."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.cli import main_guard
from megatron_ds.config import parse
from megatron_ds.config.saved_values import from_dict, to_dict
from megatron_ds.errors import CommunicationError, ConfigError, DataError
from megatron_ds.extensions.data_efficiency.options import RandomLTDConfig
from tests.harness.limits import HUNG
from tools.write_flags_doc import flags_document

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99 "
    "--micro-batch-size 2 "
    "--lr 1e-3 --train-samples 900 --rampup-batch-size 4 4 30 --global-batch-size 8 --mock-data "
    "--swiglu"
).split()


def test_flags_document_is_up_to_date():
    """If this fails: python tools/write_flags_doc.py"""
    assert (ROOT / "docs" / "reference" / "flags.md").read_text(
        encoding="utf-8"
    ) == flags_document()


def test_run_json_gives_the_same_configuration_with_its_sources():
    config = parse(FLAGS, 2)
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config and again.sources == config.sources and again.world_size == 2


def test_a_field_of_another_version_is_told():
    saved = to_dict(parse(FLAGS))
    saved["model"]["num_layer"] = 3
    with pytest.raises(
        ConfigError, match="model.num_layer, .*did you mean 'num_layers'"
    ):
        from_dict(saved)


def test_a_field_that_did_not_exist_yet_has_its_default():
    saved = to_dict(parse(FLAGS))
    del saved["train"]["label_smoothing"]
    assert from_dict(saved).train.label_smoothing == 0.0


def raising(error: BaseException):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, rank, code, said",
    [
        (ConfigError("too few"), 0, 2, "error: too few\n"),
        (ConfigError("too few"), 3, 2, ""),
        (DataError("no corpus"), 0, 2, "error: no corpus\n"),
        (
            CommunicationError("rank 1 is gone"),
            3,
            2,
            "error on rank 3: rank 1 is gone\n",
        ),
        (KeyboardInterrupt(), 0, 130, ""),
    ],
)
def test_an_error_is_told_in_one_paragraph_by_whom_it_concerns(
    capsys, error, rank, code, said
):
    assert main_guard(raising(error), rank=rank) == code
    assert capsys.readouterr().err == said


def test_an_error_that_the_ranks_agreed_on_is_told_once(capsys):
    error = DataError("no corpus")
    error.on_all_ranks = True
    assert [main_guard(raising(error), rank=rank) for rank in (0, 1)] == [2, 2]
    assert capsys.readouterr().err == "error: no corpus\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        main_guard(lambda: 1 // 0)


def test_the_configuration_needs_neither_torch_nor_yaml_and_ends_a_command_with_code_two():
    program = (
        "import sys; from megatron_ds.config import parse; from megatron_ds.cli import main_guard; "
        f"code = main_guard(lambda: parse({[*FLAGS[2:], '--num-layer', '2']}) and 0); "
        "sys.exit(99 if {'torch', 'yaml', 'numpy'} & set(sys.modules) else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: unknown flag --num-layer; did you mean '--num-layers'? All flags: --help.\n",
    )


def test_an_error_of_the_configuration_travels_between_processes():
    with pytest.raises(ConfigError) as error:
        parse([])
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value) and again.problems == error.value.problems


def test_the_older_name_of_a_section_is_read_from_checkpoints_and_files(tmp_path):
    config = parse(
        [
            *FLAGS,
            *"--num-layers 4 --random-ltd --random-ltd-min-tokens 16 --random-ltd-steps 5".split(),
        ]
    )
    saved = to_dict(config)
    saved["routing"] = saved.pop("random_ltd")
    saved["sources"] = {
        path.replace("random_ltd.", "routing.", 1): source
        for path, source in saved["sources"].items()
    }
    loaded = from_dict(saved)
    assert loaded == config and loaded.sources == config.sources
    (tmp_path / "run.yaml").write_text(
        "routing:\n  random_ltd: true\n  random_ltd_min_tokens: 16\n  "
        "random_ltd_steps: 5\n"
    )
    assert parse(
        [*FLAGS, "--num-layers", "4", "--config", str(tmp_path / "run.yaml")]
    ).of(RandomLTDConfig) == config.of(RandomLTDConfig)
