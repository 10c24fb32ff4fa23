"""Whatever a user writes, the answer is a configuration or a ConfigError, never another exception."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.compat.config.deepspeed_json import known_keys
from megatron_ds.config import RunConfig, parse
from megatron_ds.config.run import all_options
from megatron_ds.config.saved_values import from_dict, to_dict
from megatron_ds.config.sources.config_text import to_yaml
from megatron_ds.config.sources.flags import spellings
from megatron_ds.config.training_schedule import (
    make_batch_size,
    make_learning_rate,
    make_weight_decay,
)
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

GOOD = {
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "seq_length": 16,
    "vocab_size": 99,
    "micro_batch_size": 1,
    "lr": 0.1,
    "train_iters": 9,
    "mock_data": True,
}
WORDS = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "16",
    "-1",
    "0.5",
    "1e-3",
    "true",
    "auto",
    "",
    "a",
    "1,2",
    "1 2 3",
    "tp-cp",
    "none",
    "full",
    "WSD",
    "WarmupLR",
    "WarmupCosineLR",
    "cosine",
    "linear",
    "log",
    "swiglu",
    "rope",
    "E|t",
    "SIGTERM",
    "NullTokenizer",
]
RELAXED = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def survives(words: list[str], ranks: int) -> str | None:
    """Parses or is refused; what is accepted can be reported, saved, and scheduled. The message, if any."""
    good = [
        part
        for name, value in GOOD.items()
        for part in (
            ("--" + name.replace("_", "-"), str(value))
            if value is not True
            else ("--" + name.replace("_", "-"),)
        )
    ]
    try:
        config = parse([*good, *words], ranks)
    except ConfigError as error:
        assert str(error).strip()
        return str(error)
    assert isinstance(config, RunConfig) and config.num_microbatches >= 1
    assert (
        to_yaml(config) and from_dict(json.loads(json.dumps(to_dict(config)))) == config
    )
    for ramp in (
        make_learning_rate(config),
        make_weight_decay(config),
        make_batch_size(config),
    ):
        assert all(ramp.at(n) >= 0 for n in (0, 1, 7, 1000))
    return None


@RELAXED
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(spellings())),
            st.lists(st.sampled_from(WORDS), max_size=2),
        ),
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_any_flags_are_accepted_or_refused(flags, ranks):
    survives([word for flag, words in flags for word in (flag, *words)], ranks)


@RELAXED
@given(
    st.dictionaries(
        st.sampled_from(
            [path.split(".")[1] for path in all_options()]
            + ["model", "nonsense", "zero"]
        ),
        st.one_of(
            st.sampled_from(WORDS),
            st.integers(-2, 9),
            st.booleans(),
            st.none(),
            st.lists(st.integers(0, 3)),
            st.dictionaries(
                st.sampled_from(["lr", "seed", "stage"]), st.integers(0, 3)
            ),
        ),
        max_size=4,
    )
)
def test_any_yaml_is_accepted_or_refused(tmp_path, document):
    (tmp_path / "run.yaml").write_text(json.dumps(document))
    survives(["--config", str(tmp_path / "run.yaml")], 2)


@RELAXED
@given(
    st.dictionaries(
        st.sampled_from(sorted(known_keys())),
        st.one_of(
            st.sampled_from([*WORDS, "Adam", "SGD"]),
            st.integers(-2, 9),
            st.booleans(),
            st.none(),
            st.lists(st.floats(0, 1)),
            st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
        ),
        max_size=5,
    )
)
def test_any_deepspeed_json_is_accepted_or_refused(tmp_path, keys):
    document: dict = {}
    for key, value in keys.items():
        *blocks, name = key.split(".")
        block = document
        for step in blocks:
            block = block.setdefault(step, {})
        block[name] = value
    (tmp_path / "ds.json").write_text(json.dumps(document))
    survives(["--deepspeed_config", str(tmp_path / "ds.json")], 2)


NOT_JSON = "this is not JSON"
REFUSED = {  # content → words of the messages about a YAML and about a JSON file; None: accepted
    b"": (None, f":1: {NOT_JSON}: expecting value"),
    b"\xff\xfe": ("not a text file", "not a text file"),
    b"{": (
        "not YAML: expected the node content",
        f"{NOT_JSON}: expecting property name",
    ),
    b"null": ("its content is a scalar", "one block { … } of keys"),
    b"[]": ("its content is a sequence", "one block { … } of keys"),
    b'"x"': ("its content is a scalar", "one block { … } of keys"),
    b"{}": (None, None),
    b"a: &a [*a]": (":1: unknown key 'a'", NOT_JSON),
    b"seed: &a [*a]": (":1: seed needs a whole number", NOT_JSON),
    b"? [1, 2]\n: 3": (":1: a list is no key", NOT_JSON),
    b"? {a: 1}\n: 3": (":1: a block is no key", NOT_JSON),
    b"1: 2": (":1: unknown key '1'", f"{NOT_JSON}: extra data at column 2"),
    b"- a\nb": (":2: this is not YAML", NOT_JSON),
    b"lr: !!float x": (":1: lr: 'x' is not a number", NOT_JSON),
    b"clip_grad: [1, 2]": (":1: clip_grad: [1, 2] is not a number", NOT_JSON),
    b"<<: {lr: 1}": (":1: unknown key '<<'", NOT_JSON),
    b"a: b: c": (":1: this is not YAML: mapping values", NOT_JSON),
    b"%YAML 9.9\n---\na: 1": ("version 1.* is required", NOT_JSON),
    b"---\na: 1\n---\nb: 2": (
        ":3: this is not YAML: but found another document",
        NOT_JSON,
    ),
    b"config: 1": (":1: unknown key 'config'", NOT_JSON),
}


@pytest.mark.parametrize("data", REFUSED, ids=repr)
@pytest.mark.parametrize("flag, of_flag", [("--config", 0), ("--deepspeed_config", 1)])
def test_bytes_that_are_no_configuration_are_refused_with_their_place(
    tmp_path, flag, of_flag, data
):
    (tmp_path / "file").write_bytes(data)
    words, message = REFUSED[data][of_flag], survives([flag, str(tmp_path / "file")], 1)
    assert (
        message is None
        if words is None
        else words in message and str(tmp_path / "file") in message
    )


@pytest.mark.parametrize("flag", ["--config", "--deepspeed_config"])
def test_a_folder_is_no_configuration(tmp_path, flag):
    assert survives([flag, str(tmp_path)], 1) == f"{flag} {tmp_path}: is a directory."
