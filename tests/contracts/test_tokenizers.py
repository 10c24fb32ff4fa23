"""What every registered tokenizer promises; byte-level BPE against its plain reference."""

import json
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.data.tokenizers import TOKENIZERS, arrays_of, make_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.tokenizers.backend import byte_letters
from megatron_ds.extensions.tokenizers.file_tokenizers import read_bpe_files, read_vocab
from tests.harness.tokenizer_references import ByteLevelBPE, WordPiece

TEXT = [
    "The quick brown fox isn't jumping over 12 lazy dogs.\n\n  Übergrößen, naïve café!\n",
    "def train(steps: int) -> None:\n    for step in range(steps):\n        print(step, 'of', steps)\n",
    "Numbers 1234567890 and signs #$%&; the tokens of the token stream, the stream of the tokens. "
    "日本語 🙂",
]


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    """Small vocabularies of every kind, trained here: {tokenizer type: make_tokenizer's arguments}."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    bpe.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=350,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.save(str(folder / "tokenizer.json"))
    bpe.model.save(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t for text in TEXT * 20 for t in text.splitlines()),
        model_prefix=str(folder / "sp"),
        vocab_size=340,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
        num_threads=1,
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t for text in TEXT * 20 for t in text.splitlines()),
        model_prefix=str(folder / "japanese"),
        vocab_size=344,
        byte_fallback=True,
        model_type="bpe",
        user_defined_symbols=["<|endoftext|>", "<|endofline|>"],
        minloglevel=2,
        num_threads=1,
    )
    words = sorted(
        {word for text in TEXT for word in text.lower().split()}
        | set("abcdefghijklmnopqrstuvwxyz0123456789.,")
    )
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "The",
        *words,
        *(f"##{c}" for c in "abcdefgstuüé"),
        "##ing",
        "日",
    ]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    bert = dict(vocab_file=str(folder / "vocab.txt"))
    return {
        "BertWordPieceLowerCase": bert,
        "BertWordPieceCase": bert,
        "GPT2BPETokenizer": dict(
            vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        ),
        "HuggingFaceTokenizer": dict(tokenizer_model=str(folder / "tokenizer.json")),
        "SentencePieceTokenizer": dict(tokenizer_model=str(folder / "sp.model")),
        "Llama2Tokenizer": dict(tokenizer_model=str(folder / "sp.model")),
        "TokenizerFromFileWithFIM": dict(
            tokenizer_model=str(folder / "tokenizer.json")
        ),
        "JapaneseSentencePiece": dict(vocab_file=str(folder / "japanese.model")),
        "NullTokenizer": dict(vocab_size=300),
    }


@pytest.fixture(scope="session")
def reference(tokenizer_files):
    return ByteLevelBPE(*read_bpe_files(**tokenizer_files["GPT2BPETokenizer"]))


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_text_comes_back_and_ids_are_in_range(name, tokenizer_files):
    tokenizer = make_tokenizer(name, **tokenizer_files[name])
    texts = {
        "NullTokenizer": ["3 1 299 0", "7"],
        "BertWordPieceLowerCase": ["the quick tokens, fox."],
        "BertWordPieceCase": ["The quick tokens, fox."],
    }.get(name, ["The quick fox, 12 tokens.", "café 🙂 unseen Ω"])
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (
            all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
            and tokenizer.eod not in ids
        )
    empty = tokenizer.encode("")  # Llama2Tokenizer's begin of sentence, or nothing
    assert len(empty) == (name == "Llama2Tokenizer")
    assert tokenizer.encode_batch(["", *texts]) == [
        empty,
        *map(tokenizer.encode, texts),
    ]
    ids, lengths = arrays_of(tokenizer, ["", *texts])
    assert ids.tolist() == sum(map(tokenizer.encode, texts), empty)
    assert lengths.tolist() == [
        len(empty),
        *(len(tokenizer.encode(text)) for text in texts),
    ]
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_an_id_of_a_larger_model_is_decoded_without_an_error(name, tokenizer_files):
    """A model may have more rows than its tokenizer has entries, and generate one of them."""
    tokenizer = make_tokenizer(name, **tokenizer_files[name])
    ids = tokenizer.encode("7" if name == "NullTokenizer" else "the fox")
    assert isinstance(tokenizer.decode([*ids, tokenizer.vocab_size + 1000]), str)


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_fingerprint_is_the_same_again_and_its_own(name, tokenizer_files):
    prints = [
        make_tokenizer(n, **tokenizer_files[n]).fingerprint
        for n in TOKENIZERS.names()
        for _ in range(2)
    ]
    own = make_tokenizer(name, **tokenizer_files[name]).fingerprint
    assert prints.count(own) == 2 and own.startswith(name)
    assert make_tokenizer("NullTokenizer", vocab_size=301).fingerprint not in prints


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_a_missing_flag_or_file_is_an_error_naming_the_flag(name, tokenizer_files):
    for field, value in tokenizer_files[name].items():
        flag = "--" + field.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{name} needs {flag}"):
            make_tokenizer(name, **{**tokenizer_files[name], field: None})
        if isinstance(value, str):
            with pytest.raises(ConfigError, match=f"{flag} /no/such/file"):
                make_tokenizer(
                    name, **{**tokenizer_files[name], field: "/no/such/file"}
                )


@pytest.mark.parametrize(
    "name",
    [
        "GPT2BPETokenizer",
        "HuggingFaceTokenizer",
        "SentencePieceTokenizer",
        "BertWordPieceCase",
    ],
)
def test_a_file_of_something_else_is_an_error_naming_it(
    name, tokenizer_files, tmp_path
):
    (tmp_path / "junk").write_bytes(b"\xff junk")
    field = next(iter(tokenizer_files[name]))
    with pytest.raises(DataError, match="junk"):
        make_tokenizer(name, **{**tokenizer_files[name], field: str(tmp_path / "junk")})


def test_an_unknown_type_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'GPT2BPETokenizer'"):
        make_tokenizer("GPT2BPETokeniser")


def test_an_alias_of_megatron_deepspeed_is_understood(tokenizer_files):
    assert make_tokenizer(
        "HFTokenizer", **tokenizer_files["HuggingFaceTokenizer"]
    ).encode("the")


PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            " ",
            "\n",
            "  \t",
            "'s",
            "'ll",
            "the token",
            "1234",
            "Ω",
            "\u00a0",
            "<|endoftext|>",
            "\u2028",
            "\r\n",
            "e\u0301",
            "\x00",
            "٣",
        ]
    ),
)


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_fast_byte_level_bpe_equals_the_plain_reference(
    tokenizer_files, reference, text
):
    fast = make_tokenizer("GPT2BPETokenizer", **tokenizer_files["GPT2BPETokenizer"])
    ids = fast.encode(text)
    assert ids == reference.encode(text)
    assert fast.decode(ids) == reference.decode(ids) == text


def as_ever(text):
    """Only characters that Unicode has had, and seen alike, for long: the library's table of them is of
    2015."""
    old = unicodedata.ucd_3_2_0
    return "".join(
        c
        for c in text
        if old.category(c) == unicodedata.category(c) not in ("Cn", "Co")
    )


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    st.lists(
        st.one_of(
            PIECES.map(as_ever),
            st.sampled_from(
                [
                    "tokens",
                    "jumping",
                    "JUMPING",
                    "日本",
                    "ÉÀ",
                    "\u200b",
                    "_-",
                    "a" * 201,
                ]
            ),
        ),
        max_size=8,
    ).map("".join)
)
def test_fast_wordpiece_equals_the_plain_reference(tokenizer_files, text):
    vocab = read_vocab(tokenizer_files["BertWordPieceCase"]["vocab_file"])
    for name, lower in [("BertWordPieceLowerCase", True), ("BertWordPieceCase", False)]:
        assert make_tokenizer(name, **tokenizer_files[name]).encode(text) == WordPiece(
            vocab, lower
        ).encode(text)


def test_wordpiece_has_the_ids_that_bert_needs_and_folds_case_only_when_asked(
    tokenizer_files, tmp_path
):
    files = tokenizer_files["BertWordPieceCase"]
    lower, cased = (
        make_tokenizer(f"BertWordPiece{kind}Case", **files) for kind in ("Lower", "")
    )
    assert (cased.pad, cased.unk, cased.cls, cased.sep, cased.mask, cased.eod) == (
        0,
        1,
        2,
        3,
        4,
        3,
    )
    assert [cased.inv_vocab[i] for i in cased.encode("The fox")] == ["The", "fox"]
    assert [lower.inv_vocab[i] for i in lower.encode("THE foxe\u0301s 日本")] == [
        "the",
        "fox",
        "##e",
        "##s",
        "日",
        "[UNK]",
    ]
    for text, told in [
        ("[PAD]\n[UNK]\n", r"has no \[CLS\]"),
        ("[PAD]\na\n[PAD]\n", "line 3: .* line 1 already"),
    ]:
        (tmp_path / "vocab.txt").write_text(text)
        with pytest.raises(DataError, match=told):
            make_tokenizer("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))


def test_bytes_have_the_letters_that_gpt2_gave_them():
    letters = byte_letters()
    assert (
        letters[ord(" ")] == "Ġ"
        and letters[ord("\n")] == "Ċ"
        and letters[ord("A")] == "A"
        and letters[0xAD] == "Ń"
    )
    assert len(set(letters.values())) == 256


def test_merges_of_another_vocabulary_are_an_error_with_the_line(
    tokenizer_files, tmp_path
):
    files = tokenizer_files["GPT2BPETokenizer"]
    with open(files["merge_file"], encoding="utf-8") as f:
        (tmp_path / "merges.txt").write_text(
            f.readline() + f.readline() + "q zebra\n", encoding="utf-8"
        )
    files = {**files, "merge_file": str(tmp_path / "merges.txt")}
    with pytest.raises(DataError, match="line 3: 'q zebra'"):
        make_tokenizer("GPT2BPETokenizer", **files)


def test_a_folder_with_a_config_names_its_own_end_of_document(
    tokenizer_files, tmp_path
):
    source = tokenizer_files["HuggingFaceTokenizer"]["tokenizer_model"]
    (tmp_path / "tokenizer.json").write_bytes(open(source, "rb").read())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "!"}})
    )
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert tokenizer.decode([tokenizer.eod]) == "!"
    assert make_tokenizer("HuggingFaceTokenizer", tokenizer_model=source).eod == 0


def test_null_tokenizer_refuses_what_is_not_an_id_in_range():
    tokenizer = make_tokenizer("NullTokenizer", vocab_size=10)
    assert (
        tokenizer.vocab_size == 11
        and tokenizer.eod == 10
        and tokenizer.encode("9 10") == [9, 10]
    )
    for text, message in [
        ("1 x", "decimal"),
        ("11", "allows 0 to 10"),
        ("-1", "allows 0 to 10"),
    ]:
        with pytest.raises(DataError, match=message):
            tokenizer.encode(text)


def test_llama2_tokenizer_is_the_sentencepiece_model_with_a_begin_of_sentence(
    tokenizer_files,
):
    files = tokenizer_files["Llama2Tokenizer"]
    plain = make_tokenizer("SentencePieceTokenizer", **files)
    llama = make_tokenizer("Llama2Tokenizer", **files)
    assert llama.encode("The fox") == [
        1,
        *plain.encode("The fox"),
    ]  # <s> of every such model
    assert (llama.vocab_size, llama.eod) == (plain.vocab_size, plain.eod)
    assert llama.fingerprint != plain.fingerprint


def test_a_tokenizer_with_fill_in_the_middle_has_the_tokens_that_its_file_lacks(
    tokenizer_files,
):
    files = tokenizer_files["TokenizerFromFileWithFIM"]
    plain = make_tokenizer("HuggingFaceTokenizer", **files)
    more = make_tokenizer("TokenizerFromFileWithFIM", **files)
    # The file has the end of document already.
    assert more.vocab_size == plain.vocab_size + 4
    assert (more.eod, more.encode("The fox")) == (plain.eod, plain.encode("The fox"))
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
    ids = [more.encode(name) for name in names]
    assert ids == [[plain.vocab_size + i] for i in range(4)]


def test_the_japanese_model_has_tokens_for_ends_of_lines_and_of_documents(
    tokenizer_files,
):
    import sentencepiece

    files = tokenizer_files["JapaneseSentencePiece"]
    processor = sentencepiece.SentencePieceProcessor(model_file=files["vocab_file"])
    tokenizer = make_tokenizer("JapaneseSentencePiece", **files)
    text = "The fox\nand 12 tokens"
    assert tokenizer.eod == processor.piece_to_id("<|endoftext|>")
    assert processor.piece_to_id("<|endofline|>") in tokenizer.encode(text)
    # As the fork does it: the line break becomes a symbol before the text is cut.
    assert tokenizer.encode(text) == processor.encode(
        text.replace("\n", "<|endofline|>")
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_japanese_model_needs_an_end_of_document(tokenizer_files):
    other = tokenizer_files["SentencePieceTokenizer"]["tokenizer_model"]
    with pytest.raises(DataError, match="endoftext"):
        make_tokenizer("JapaneseSentencePiece", vocab_file=other)
