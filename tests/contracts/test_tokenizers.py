"""What every registered tokenizer promises; byte-level BPE against its plain reference."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ds.data.tokenizers import TOKENIZERS, make_tokenizer
from megatron_ds.data.tokenizers.gpt2_bpe import ByteLevelBPE, byte_letters, read_bpe_files
from megatron_ds.errors import ConfigError, DataError

TEXT = ["The quick brown fox isn't jumping over 12 lazy dogs.\n\n  Übergrößen, naïve café!\n",
        "def train(steps: int) -> None:\n    for step in range(steps):\n        print(step, 'of', steps)\n",
        "Numbers 1234567890 and signs #$%&; the tokens of the token stream, the stream of the tokens. 日本語 🙂"]


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    """Small vocabularies of every kind, trained here: {tokenizer type: make_tokenizer's arguments}."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(TEXT * 3, trainers.BpeTrainer(
        vocab_size=350, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    bpe.save(str(folder / "tokenizer.json"))
    bpe.model.save(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t for text in TEXT * 20 for t in text.splitlines()), model_prefix=str(folder / "sp"),
        vocab_size=340, byte_fallback=True, model_type="bpe", minloglevel=2, num_threads=1)
    return {
        "GPT2BPETokenizer": dict(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")),
        "HuggingFaceTokenizer": dict(tokenizer_model=str(folder / "tokenizer.json")),
        "SentencePieceTokenizer": dict(tokenizer_model=str(folder / "sp.model")),
        "NullTokenizer": dict(vocab_size=300),
    }


@pytest.fixture(scope="session")
def reference(tokenizer_files):
    return ByteLevelBPE(*read_bpe_files(**tokenizer_files["GPT2BPETokenizer"]))


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_text_comes_back_and_ids_are_in_range(name, tokenizer_files):
    tokenizer = make_tokenizer(name, **tokenizer_files[name])
    texts = ["3 1 299 0", "7"] if name == "NullTokenizer" else ["The quick fox, 12 tokens.", "café 🙂 unseen Ω"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids) and tokenizer.eod not in ids
    assert tokenizer.encode_batch(["", *texts]) == [[], *map(tokenizer.encode, texts)]
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_fingerprint_is_the_same_again_and_its_own(name, tokenizer_files):
    prints = [make_tokenizer(n, **tokenizer_files[n]).fingerprint for n in TOKENIZERS.names() for _ in range(2)]
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
                make_tokenizer(name, **{**tokenizer_files[name], field: "/no/such/file"})


@pytest.mark.parametrize("name", ["GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_a_file_of_something_else_is_an_error_naming_it(name, tokenizer_files, tmp_path):
    (tmp_path / "junk").write_bytes(b"\xff junk")
    field = next(iter(tokenizer_files[name]))
    with pytest.raises(DataError, match="junk"):
        make_tokenizer(name, **{**tokenizer_files[name], field: str(tmp_path / "junk")})


def test_an_unknown_type_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'GPT2BPETokenizer'"):
        make_tokenizer("GPT2BPETokeniser")


def test_an_alias_of_megatron_deepspeed_is_understood(tokenizer_files):
    assert make_tokenizer("HFTokenizer", **tokenizer_files["HuggingFaceTokenizer"]).encode("the")


PIECES = st.one_of(st.text(max_size=8), st.sampled_from([" ", "\n", "  \t", "'s", "'ll", "the token", "1234", "Ω", "\u00a0",
                                                         "<|endoftext|>", "\u2028", "\r\n", "e\u0301", "\x00", "٣"]))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_fast_byte_level_bpe_equals_the_plain_reference(tokenizer_files, reference, text):
    fast = make_tokenizer("GPT2BPETokenizer", **tokenizer_files["GPT2BPETokenizer"])
    ids = fast.encode(text)
    assert ids == reference.encode(text)
    assert fast.decode(ids) == reference.decode(ids) == text


def test_bytes_have_the_letters_that_gpt2_gave_them():
    letters = byte_letters()
    assert letters[ord(" ")] == "Ġ" and letters[ord("\n")] == "Ċ" and letters[ord("A")] == "A" and letters[0xAD] == "Ń"
    assert len(set(letters.values())) == 256


def test_merges_of_another_vocabulary_are_an_error_with_the_line(tokenizer_files, tmp_path):
    files = tokenizer_files["GPT2BPETokenizer"]
    with open(files["merge_file"], encoding="utf-8") as f:
        (tmp_path / "merges.txt").write_text(f.readline() + f.readline() + "q zebra\n", encoding="utf-8")
    files = {**files, "merge_file": str(tmp_path / "merges.txt")}
    with pytest.raises(DataError, match="line 3: 'q zebra'"):
        make_tokenizer("GPT2BPETokenizer", **files)


def test_a_folder_with_a_config_names_its_own_end_of_document(tokenizer_files, tmp_path):
    source = tokenizer_files["HuggingFaceTokenizer"]["tokenizer_model"]
    (tmp_path / "tokenizer.json").write_bytes(open(source, "rb").read())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert tokenizer.decode([tokenizer.eod]) == "!"
    assert make_tokenizer("HuggingFaceTokenizer", tokenizer_model=source).eod == 0


def test_null_tokenizer_refuses_what_is_not_an_id_in_range():
    tokenizer = make_tokenizer("NullTokenizer", vocab_size=10)
    assert tokenizer.vocab_size == 11 and tokenizer.eod == 10 and tokenizer.encode("9 10") == [9, 10]
    for text, told in [("1 x", "decimal"), ("11", "not all in"), ("-1", "not all in")]:
        with pytest.raises(DataError, match=told):
            tokenizer.encode(text)
