"""Features of other packages: how they are found, named when they are missing, and what they may not do."""

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ds import commands, features
from megatron_ds.checkpoint.run_file import require_whole_model
from megatron_ds.config import parse
from megatron_ds.config.compared_values import compared_values
from megatron_ds.config.options.option import option
from megatron_ds.config.run import all_options
from megatron_ds.config.saved_values import from_dict, to_dict
from megatron_ds.errors import CheckpointError, ConfigError
from megatron_ds.features import Feature, Lengths, Provided, sections_without_features
from megatron_ds.models import MODELS

pytestmark = pytest.mark.plan
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 9 --tokenizer-type NullTokenizer"
).split()


@dataclass(frozen=True)
class Loudness:
    loudness: int = option(1, help="A number.")


@contextmanager
def loaded(feature):
    state = features._LOADED
    features.features()
    state.features.append(feature)
    state.number += 1
    try:
        yield
    finally:
        state.features.remove(feature)
        state.number += 1


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the working directory, which is forgotten afterwards."""
    name = "feature_of_a_test"
    (tmp_path / f"{name}.py").write_text("words = []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(features._LOADED, "origins", dict(features._LOADED.origins))
    yield name
    sys.modules.pop(name, None)


def test_what_no_feature_has_is_named():
    assert Provided("a missing part").find() is None
    with pytest.raises(
        ConfigError, match="a missing part: no feature that is installed"
    ):
        Provided("a missing part").get()


def test_options_of_a_feature_are_flags_and_keys_and_a_section(tmp_path):
    with loaded(Feature("loud", options=Loudness)):
        assert parse([*MODEL, "--loudness", "3"]).of(Loudness).loudness == 3
        file = tmp_path / "run.yaml"
        file.write_text("loud:\n  loudness: 4\n")
        config = parse([*MODEL, "--config", str(file)])
        assert config.get("loud.loudness") == 4
        assert from_dict(to_dict(config)) == config
    assert "loud.loudness" not in all_options()
    with pytest.raises(ConfigError, match="has no section Loudness"):
        parse(MODEL).of(Loudness)


def test_a_section_that_was_added_later_is_an_error_of_a_configuration():
    config = parse(MODEL)
    with loaded(Feature("loud", options=Loudness)):
        with pytest.raises(ConfigError, match="its feature was not loaded"):
            config.get("loud.loudness")


@dataclass(frozen=True)
class Clash:
    seed: int = option(1, help="A name of the package.")


@pytest.mark.parametrize("name", ["clash", "train"])
def test_names_of_the_package_are_refused(name):
    with loaded(Feature(name, options=Clash)):
        with pytest.raises(ConfigError, match="Rename the option|another name"):
            parse(MODEL)


def test_a_command_with_a_name_of_the_package_is_refused():
    with loaded(Feature("x", commands={"train": commands.COMMANDS["plan"]})):
        with pytest.raises(ConfigError, match="has a command 'train'"):
            commands.overview()


def test_a_command_has_its_words_without_the_flag(module, capsys):
    command = commands.Command(module, "print", "run")
    with open(f"{module}.py", "a") as file:
        file.write("def run(argv):\n    print(*argv)\n    return 3\n")
    with loaded(Feature("x", commands={"show": command})):
        with pytest.raises(SystemExit) as ended:
            commands.main(["show", "a", "--import", module, "b"])
    assert ended.value.code == 3
    assert capsys.readouterr().out == "a b\n"


def test_a_flag_and_a_yaml_file_import_a_module_and_a_run_json_imports_none(
    module, tmp_path
):
    config = to_dict(parse(MODEL))
    run = {"format_version": 2, "import": module, "config": config}
    (tmp_path / "run.json").write_text(json.dumps(run))
    parse(["--config", "run.json"])
    assert module not in sys.modules
    (tmp_path / "run.yaml").write_text(f"import: {module}\n")
    parse([*MODEL, "--config", "run.yaml"])
    assert module in sys.modules


def test_a_module_that_cannot_be_imported_is_named(module, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    for name, why in (("broken", "nothing_of_this_name"), ("a/b.py", "is no name of")):
        with pytest.raises(ConfigError, match=why):
            parse([*MODEL, "--import", name])


def recorded(*supplies, sources=()):
    entry = {"module": "m", "distribution": "d 1", "supplies": list(supplies)}
    config = {
        "model": {"model": "gpt"},
        "sources": dict.fromkeys(sources, ["flag", ""]),
    }
    return {"features": [entry], "config": config}


def test_a_run_needs_the_features_of_its_model_and_its_options_alone():
    unused = recorded("options of [loud]", "sinks of loud", "model other")
    assert sections_without_features(unused, "x") == {"loud"}
    for needed in (
        recorded("options of [loud]", sources=["loud.loudness"]),
        recorded("model gpt"),
        recorded("layers of loud"),
    ):
        with pytest.raises(ConfigError, match="x: the run uses .* install d 1"):
            sections_without_features(needed, "x")
    assert sections_without_features({"features": [{"module": []}, 7]}, "x") == set()


def test_of_parts_that_a_run_has_once_two_are_an_error():
    lengths = Lengths(lambda config: True, lambda config: 7, lambda *given: None)
    with loaded(Feature("short", lengths=lengths)):
        assert parse(MODEL).sequence_lengths == 7
        with loaded(Feature("shorter", lengths=lengths)):
            config = parse(MODEL)
            with pytest.raises(ConfigError, match="short and shorter change the same"):
                _ = config.sequence_lengths


def test_a_change_of_the_layers_follows_those_of_the_features_that_it_names():
    named = lambda name: lambda layers, config, ctx: [*layers, name]
    outer = Feature("outer", layers=named("outer"), after=("inner", "not loaded"))
    with loaded(outer), loaded(Feature("inner", layers=named("inner"))):
        layers = []
        config = parse(MODEL)
        for change in features.layer_changes(config):
            layers = change(layers, config, None)
    assert layers == ["inner", "outer"]


def test_weights_of_a_feature_that_is_not_loaded_are_no_whole_model():
    parts = {"model": {}, "tokenizer": {}, "data": {}}
    require_whole_model({"identity": parts}, "x")
    with pytest.raises(CheckpointError, match="x holds prompts, which no feature"):
        require_whole_model({"identity": parts | {"prompts": {}}}, "x")


def test_an_unknown_section_of_a_saved_configuration_is_an_error():
    saved = to_dict(parse(MODEL)) | {"loud": {"loudness": 3}}
    with pytest.raises(ConfigError, match="a section loud, which does not exist"):
        from_dict(saved)
    assert from_dict(saved, {"loud"}) == parse(MODEL)


def test_ranks_compare_their_features(module):
    before = compared_values(parse(MODEL), env={})
    parse([*MODEL, "--import", module])
    assert compared_values(parse(MODEL), env={}) != before


def test_a_declared_entry_is_found_by_an_alias_that_its_module_registers(module):
    Path(f"{module}.py").write_text(
        "from megatron_ds.models import MODELS, gpt_layers, language_model\n"
        'MODELS.register("declared", "alias")(language_model(lambda c, ctx: gpt_layers(c, ctx)))\n'
    )
    sys.path.append(str(Path.cwd()))
    entries = {"declared": module, "alias": module}
    with loaded(Feature("declaring", registers={"model": entries})):
        assert "declared" in MODELS and module not in sys.modules
        # What is declared counts as present before it is used.
        assert (module, "model declared") in features._registered()
        assert MODELS["alias"] is MODELS["declared"]
        assert "alias" not in MODELS.names()
    for table in (MODELS._things, MODELS._owners):
        table.pop("declared", None)
    MODELS._aliases.pop("alias")


def test_entries_without_names_are_refused():
    with pytest.raises(ConfigError, match="Give each entry by its name"):
        features._add(Feature("old", registers={"model": "mymods"}), "here")
