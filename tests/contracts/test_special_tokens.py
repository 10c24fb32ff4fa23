"""Special tokens of Hugging Face tokenizers are those of transformers; damaged files are one clear error."""

import errno
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.tokenizers.special_tokens import END_NAMES, special_tokens

ADDED = ("<|endoftext|>", "<|im_end|>", "</s>", "<s>", "<unk>", "<pad>")
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def library_json(added, vocab=None):
    """The content of a tokenizer.json: one token a letter, and added tokens behind them."""
    letters = vocab or {chr(97 + i): i for i in range(26)}
    flags = dict(
        single_word=False, lstrip=False, rstrip=False, normalized=False, special=True
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [
            dict(id=len(letters) + i, content=token, **flags)
            for i, token in enumerate(added)
        ],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": letters,
            "merges": [],
        },
    }


def written(folder, library, **files):
    """A folder with a tokenizer.json and others; None leaves a file out."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    contents = {"tokenizer": library, **files}
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
    return folder


def made(folder):
    return make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


def named(tokens):
    """Files that name some special tokens, as strings or as objects."""
    as_object = lambda text: {
        "__type": "AddedToken",
        "content": text,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    value = st.one_of(
        st.none(), st.sampled_from(tokens), st.sampled_from(tokens).map(as_object)
    )
    return st.dictionaries(st.sampled_from(NAMES), value, max_size=4)


def without_type(content):
    """The content in the form of special_tokens_map.json: objects without their type."""
    return {
        name: {key: part for key, part in value.items() if key != "__type"}
        if isinstance(value, dict)
        else value
        for name, value in content.items()
    }


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    added=st.sets(st.sampled_from(ADDED), min_size=1).map(sorted),
    config=named(ADDED),
    other=named(ADDED),
    has_config=st.booleans(),
    has_map=st.booleans(),
    has_decoder=st.booleans(),
)
def test_special_ids_are_those_of_transformers(
    tmp_path, added, config, other, has_config, has_map, has_decoder
):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    )
    library = library_json(added)
    decoder = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in library["added_tokens"]
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
        **({"added_tokens_decoder": decoder} if has_decoder else {}),
    }
    folder = written(
        tmp_path / "tokenizer",
        library,
        tokenizer_config=about if has_config else None,
        special_tokens_map=without_type(other) if has_map else None,
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours, size = special_tokens(folder), 26 + len(added)
    for name in NAMES:
        expected = getattr(theirs, f"{name}_id")
        assert ours.get(name) == (
            None if expected is None else theirs.convert_ids_to_tokens(expected)
        ), name
    end, candidates = (
        theirs.eos_token_id,
        [token for token in added if token in END_NAMES],
    )
    if end is not None and end < size or end is None and len(candidates) == 1:
        assert made(folder).eod == (
            end if end is not None else 26 + added.index(candidates[0])
        )
        return
    if end is not None:
        reason = "lacks it"
    elif candidates:
        reason = "2 tokens that may end"
    else:
        reason = "no end-of-document"
    with pytest.raises(DataError, match=reason):
        made(folder)


DEEP = "[" * 100_000
CONFIGS = {
    "a list": {"eos_token": ["a"]},
    "a number": {"eos_token": 5},
    "an object": {"eos_token": {"content": 5}},
    "deep nesting": '{"eos_token": ' + DEEP,
    "a list at the top": [1],
    "no JSON": "{",
    "a table of numbers": {"added_tokens_decoder": {"0": 3}},
    "a table that is none": {"added_tokens_decoder": 7},
    "a token that is not there": {"added_tokens_decoder": {"99": {"content": "<new>"}}},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_a_damaged_file_of_special_tokens_is_one_error_that_names_it(
    name, file, tmp_path
):
    folder = written(tmp_path / "t", library_json(ADDED[1:2]), **{file: CONFIGS[name]})
    if file == "special_tokens_map" and "added_tokens_decoder" in CONFIGS[name]:
        return  # has no meaning there
    with pytest.raises(DataError, match=f"{file}.json"):
        made(folder)


def test_a_folder_without_a_tokenizer_json_says_what_writes_one(tmp_path):
    with pytest.raises(DataError, match="the folder has no tokenizer.json"):
        made(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    folder = written(tmp_path / "t", library_json(ADDED[:1]), tokenizer_config={})

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)  # root may read any file
        with pytest.raises(DataError, match="json cannot be read: Permission denied"):
            special_tokens(folder)


CHARSMAP = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
LIBRARIES = {
    "an id of 4 bytes": (
        library_json(ADDED[:1], {"a": 0, "b": 2**32 - 1}),
        "has the id 4294967295",
    ),
    "a damaged map of characters": (
        library_json(ADDED[:1]) | CHARSMAP,
        "cannot be read as a tokenizer",
    ),
    "deep nesting": (DEEP, "cannot be read as a tokenizer"),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_damaged_library_file_is_one_error(name, tmp_path):
    content, told = LIBRARIES[name]
    with pytest.raises(DataError, match=told):
        made(written(tmp_path / "t", content))


def test_a_pattern_that_never_ends_is_one_error(tmp_path):
    split = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = made(
        written(tmp_path / "t", library_json(ADDED[:1]) | {"pre_tokenizer": split})
    )
    with pytest.raises(
        DataError, match="a text cannot be encoded: the tokenizers library failed"
    ):
        tokenizer.encode("x" * 60)
    with pytest.raises(
        DataError, match="a text cannot be encoded: the tokenizers library failed"
    ):
        tokenizer.encode_batch(["a", "x" * 60])


VOCABULARIES = {
    "a negative id": ({"a": -1}, "has the id -1 for 'a'"),
    "a large id": ({"a": 2**70}, "has the id 11805"),
    "an id of 4 bytes": ({"a": 2**32 - 1}, "has the id 4294967295"),
    "a truth": ({"a": True}, "not a JSON object"),
    "deep nesting": ('{"a": ' + DEEP, "nested too deeply"),
    "one id twice": ({"a": 1, "b": 1}, "has the id 1 for 'a' and for 'b'"),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_damaged_vocabulary_is_one_error_that_names_it(name, tmp_path):
    content, told = VOCABULARIES[name]
    text = (
        content
        if isinstance(content, str)
        else json.dumps({"<|endoftext|>": 0, **content})
    )
    (tmp_path / "vocab.json").write_text(text)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match=f"--vocab-file .*vocab.json.*{told}"):
        make_tokenizer(
            "GPT2BPETokenizer",
            vocab_file=str(tmp_path / "vocab.json"),
            merge_file=str(tmp_path / "merges.txt"),
        )
