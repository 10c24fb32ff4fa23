"""The compiled byte-level BPE gives the ids of the `tokenizers` library; what it cannot serve is left to the
library."""

import json
import logging
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.tokenizers import backend
from megatron_ds.extensions.tokenizers.backend import MOST_DIGITS, plan_native

TEXT = [
    "The quick brown fox isn't jumping over 12 lazy dogs.\n\n  Übergrößen, naïve café! It'S 12345 "
    "o'clock\r\n\r\n  x",
    "def train(steps: int) -> None:\n    for step in range(steps):\n        print(step, 'of', "
    "steps)\n\n\n",
    "the tokens of the token stream, the stream of the tokens; 日本語 日本 語日 🙂 the the tokens"
    * 3,
]
WAYS = ["gpt2", *MOST_DIGITS]
needs_native = pytest.mark.skipif(
    backend.extension() is None, reason="megatron_ds was installed without a compiler"
)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """A tokenizer.json trained here, for a way to cut, with changes to its description."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def make(way="gpt2", change=lambda parts: None):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False)
            if way == "gpt2"
            else (
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(way), "isolated"),
                        pre_tokenizers.ByteLevel(
                            add_prefix_space=False, use_regex=False
                        ),
                    ]
                )
            )
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            TEXT * 3,
            trainers.BpeTrainer(
                vocab_size=420,
                special_tokens=["<|endoftext|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        tokenizer.add_tokens(["jumping over"])
        parts = json.loads(tokenizer.to_str())
        change(parts)
        path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
        path.write_text(json.dumps(parts), encoding="utf-8")
        return str(path)

    return make


def both(path):
    return [
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=path, backend=name)
        for name in ("native", "tokenizers")
    ]


def assert_same(path, texts):
    (ids, lengths), (theirs, their_lengths) = (
        t.encode_arrays(texts) for t in both(path)
    )
    assert (
        ids.tolist() == theirs.tolist() and lengths.tolist() == their_lengths.tolist()
    )


PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            " ",
            "\n",
            "  \t",
            "'s",
            "'LL",
            "'\u017f",
            "the token",
            "1234567",
            "Ω",
            "\u00a0",
            "<|endoftext|>",
            "jumping over",
            "<|",
            "\u2028",
            "\r\n",
            " \r\n ",
            "e\u0301",
            "\x00",
            "٣",
            "日本",
            "!!\r\n",
            " ?",
            "\x1c",
            "a" * 70,
            "tokens" * 60,
        ]
    ),
)


@needs_native
@pytest.mark.parametrize("way", WAYS, ids=["gpt2", "three digits", "single digits"])
def test_native_ids_are_the_librarys_on_any_text(way, file_of, monkeypatch):
    monkeypatch.setattr(backend, "CHECKED_BYTES", 0)  # nothing else compares
    native, library = both(file_of(way))

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.lists(PIECES, max_size=8).map("".join), max_size=3))
    def same(texts):
        (ids, lengths), (theirs, their_lengths) = (
            native.encode_arrays(texts),
            library.encode_arrays(texts),
        )
        assert (
            ids.tolist() == theirs.tolist()
            and lengths.tolist() == their_lengths.tolist()
        )

    same()


@needs_native
@pytest.mark.parametrize("way", WAYS, ids=["gpt2", "three digits", "single digits"])
def test_characters_are_of_the_librarys_class(way, file_of):
    codes = [
        c
        for c in range(0, 0x33500, 2 if way == "gpt2" else 17)
        if not 0xD800 <= c < 0xE000
    ]
    assert_same(
        file_of(way),
        [
            "".join(f"a{chr(c)}1{chr(c)}! {chr(c)}" for c in codes[i::16])
            for i in range(16)
        ],
    )


@needs_native
def test_a_memory_that_overflows_changes_no_id(file_of):
    native, library = both(file_of())
    random = np.random.RandomState(5)
    words = [
        " " + "".join(row) for row in random.choice(list("abcdefghijklm"), (560_000, 5))
    ]
    ids, _ = native.encode_arrays(["".join(words[:100])])
    lengths = [
        native.encode_arrays(["".join(words[i : i + 100_000])])[1][0]
        for i in range(0, len(words), 100_000)
    ]
    again, _ = native.encode_arrays(["".join(words[:100])])
    assert ids.tolist() == again.tolist() == library.encode("".join(words[:100]))
    assert min(lengths) > 100_000


@needs_native
def test_whole_words_first_when_the_model_says_so(file_of):
    def whole_words(parts):
        parts["model"]["ignore_merges"] = True
        parts["model"]["vocab"]["Ġzebras"] = 900  # no merges lead to it

    path = file_of(change=whole_words)
    assert both(path)[0].encode_arrays(["two zebras"])[0].tolist()[-1] == 900
    assert_same(path, ["two zebras, the zebras tokens"])


CHANGES = [
    (
        lambda p: p["model"].update(dropout=1e-9),
        "dropout",
    ),  # so small that it does not strike here
    (lambda p: p.update(normalizer={"type": "NFC"}), "normalizes text"),
    (
        lambda p: p["pre_tokenizer"].update(add_prefix_space=True),
        "cuts text in another way",
    ),
    (
        lambda p: p.update(pre_tokenizer={"type": "Whitespace"}),
        "cuts text in another way",
    ),
]


@needs_native
@pytest.mark.parametrize(
    "change, told", CHANGES, ids=[f"{i}: {told}" for i, (_, told) in enumerate(CHANGES)]
)
def test_what_native_does_not_know_is_served_by_the_library_and_said(
    change, told, file_of, caplog
):
    path = file_of(change=change)
    assert told in plan_native(open(path, encoding="utf-8").read())
    with pytest.raises(ConfigError, match=told):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=path, backend="native")
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=path)
    with caplog.at_level(logging.INFO):
        assert tokenizer.encode_arrays(["the tokens"])[1].tolist() == [
            len(tokenizer.encode("the tokens"))
        ]
    assert told in caplog.text


def test_without_a_compiler_the_library_serves_and_says_so(
    file_of, caplog, monkeypatch
):
    monkeypatch.setattr(backend, "extension", lambda: None)
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=file_of())
    with caplog.at_level(logging.INFO):
        assert tokenizer.encode_arrays(["the tokens"])[0].tolist() == tokenizer.encode(
            "the tokens"
        )
    assert "without a C++17 compiler" in caplog.text


class Wrong:
    """A gigatoken that is one off from the fifth token of a text on."""

    def __init__(self, description):
        from tokenizers import Tokenizer

        self._library = Tokenizer.from_str(description)

    from_json = classmethod(lambda cls, description: cls(description))

    def encode_batch_list(self, texts, parallel):
        rows = (
            self._library.encode(text, add_special_tokens=False).ids for text in texts
        )
        return [[i + (n > 4) for n, i in enumerate(row)] for row in rows]


def test_a_backend_with_other_ids_is_an_error_that_says_where(file_of, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "gigatoken", types.SimpleNamespace(Tokenizer=Wrong)
    )
    tokenizer = make_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=file_of(), backend="gigatoken"
    )
    assert tokenizer.encode_arrays(["the"])[0].tolist() == tokenizer.encode("the")
    with pytest.raises(DataError, match="gigatoken gives other ids .* from token 5 on"):
        tokenizer.encode_arrays(["the", TEXT[0]])


def test_a_backend_that_is_not_there_is_an_error(file_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    for name, told in [
        ("gigatoken", "needs the package gigatoken"),
        ("fast", "use one of auto, native"),
    ]:
        with pytest.raises(ConfigError, match=told):
            make_tokenizer(
                "HuggingFaceTokenizer", tokenizer_model=file_of(), backend=name
            )
    with pytest.raises(ConfigError, match="NullTokenizer has only one encoder"):
        make_tokenizer("NullTokenizer", vocab_size=9, backend="native")
