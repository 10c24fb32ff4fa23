"""A text has the ids of transformers' `tokenizer(text)` in every command and endpoint, and ends at each token at which
transformers ends it."""

import json
import shutil

import pytest
import torch

from megatron_ds.config import DataConfig
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import DataError
from megatron_ds.extensions.evaluation.checkpoint_model import (
    evaluation_config,
    load_model,
)
from megatron_ds.extensions.evaluation.greedy_text import Prompt, continue_greedily
from megatron_ds.extensions.evaluation.leading_rank import lead
from megatron_ds.extensions.evaluation.scorer import Scorer
from megatron_ds.extensions.evaluation.zero_shot import last_word
from megatron_ds.extensions.generation import generate_text
from megatron_ds.extensions.generation.model_text import end_tokens, text_ids
from megatron_ds.extensions.serving import serve
from megatron_ds.extensions.tokenizers.file_tokenizers import HuggingFaceTokenizer
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.mpu.mesh import Mesh
from tests.evaluation.test_evaluation_harness import folder_of, theirs
from tests.generation.test_generator import led
from tests.harness.byte_tokenizer import BEGIN, END, save_tokenizer
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed"
)

TEXTS = ["Hello", "", " a\nb", "Größe <end> b"]
NEW = 12


def by_transformers(text, ends):
    """The greedy continuation of `tokenizer(text)`, whose ids are there as well."""
    words = transformers.AutoTokenizer.from_pretrained(folder_of("llama"))
    ids = words(text, return_tensors="pt").input_ids
    with torch.no_grad():
        found = theirs("llama").generate(
            ids, do_sample=False, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0
        )
    return ids[0].tolist(), found[0, ids.shape[1] :].tolist()


def folder_with(tmp_path, name="generation_config.json", **settings):
    """The folder of a model in which one file has other settings."""
    folder = tmp_path / "model"
    shutil.copytree(folder_of("llama"), folder)
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


def loaded(folder, work):
    """`work(model, generator)` with the model of a folder."""
    config = evaluation_config(["--load", str(folder)], Launch(world_size=1))

    def main(rank, world):
        mesh = Mesh(config.grid(1), rank, world.connect, torch.device("cpu"))
        model = load_model(config, mesh)
        return led(model.replica, lambda generator, _: work(model, generator))

    return run_ranks(1, main)[0]


def test_a_text_has_the_ids_of_transformers(tmp_path):
    save_tokenizer(tmp_path)
    ours = HuggingFaceTokenizer(str(tmp_path))
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert list(text_ids(ours, text)) == words(text).input_ids
    # A tokenizer without a beginning: an empty text follows the end of another.
    assert text_ids(NullTokenizer(50), "3 4") == (3, 4)
    assert text_ids(NullTokenizer(50), "") == (50,)
    assert text_ids(ours, "<begin>a") == text_ids(ours, "a")


def test_commands_continue_what_transformers_continues_and_end_where_it_ends(
    tmp_path, capsys
):
    # Another token that ends a text is one that comes up in it.
    _, free = by_transformers("Hello", END)
    other = free[3]
    folder = folder_with(tmp_path, eos_token_id=[END, other])
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\n")
    base = ["--load", str(folder), "--greedy", "--json", "--logprobs", "0"]
    base += ["--prompt-logprobs", "--max-new-tokens", str(NEW)]
    given = [["--prompt", "Hello"], ["--prompts-file", str(file)]]

    def work(model, generator):
        for flags in given:
            args, _ = generate_text.parse_arguments([*base, *flags])
            generate_text.show(args, model, generator)
        args, _ = serve.own_flags(serve._parser(), ["--load", str(folder)])
        served = serve.served_model(args, model, generator, None)
        return served.encode("Hello", "prompt"), served.end_tokens

    served, ends = loaded(folder, work)
    records = [
        json.loads(line)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("{")
    ]
    ids, expected = by_transformers("Hello", [END, other])
    assert expected == free[: free.index(other) + 1] != free
    assert len(records) == 2
    for record in records:
        assert record["prompt"] == "Hello"
        assert (record["prompt_tokens"], record["tokens"]) == (ids, expected)
        assert record["finish"] == "stop"
    assert list(served) == ids and ends == {END, other}


def test_evaluation_ends_a_text_where_transformers_does(tmp_path):
    ids, free = by_transformers("Hello", END)
    folder = folder_with(tmp_path, eos_token_id=[END, free[3]])
    config = evaluation_config(["--load", str(folder)], Launch(world_size=1))

    def main(rank, world):
        mesh = Mesh(config.grid(1), rank, world.connect, torch.device("cpu"))
        model = load_model(config, mesh)
        prompts = [Prompt(tuple(ids), (), NEW)]
        ask = lambda score: continue_greedily(
            score, model.tokenizer, prompts, 96, model.ends
        )
        return lead(Scorer(model.replica), ask), model.tokenizer

    texts, words = run_ranks(1, main)[0]
    assert texts == [words.decode(free[: free.index(free[3])])]


@pytest.mark.parametrize(
    "files, ends",
    [
        ({"generation_config.json": [7, 9]}, {7, 9, END}),
        ({"generation_config.json": 7, "config.json": [8]}, {7, END}),
        ({"config.json": [8, 9]}, {8, 9, END}),
        ({"generation_config.json": None, "config.json": 8}, {END}),
        ({"generation_config.json": [7, 50256]}, {7, END}),  # no token has that id
        ({}, {END}),
    ],
)
def test_ends_are_those_of_the_files_beside_the_tokenizer(tmp_path, files, ends):
    save_tokenizer(tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    words = HuggingFaceTokenizer(str(tmp_path))
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert end_tokens(words, DataConfig(tokenizer_model=str(place))) == ends


@pytest.mark.parametrize(
    "content, why",
    [
        ('{"eos_token_id": "</s>"}', "are ids, one or a list"),
        ('{"eos_token_id": [true]}', "are ids, one or a list"),
        ('{"eos_token_id": [-1]}', "are ids, one or a list"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_damaged_list_of_ends_is_an_error(tmp_path, content, why):
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    words = HuggingFaceTokenizer(str(tmp_path))
    with pytest.raises(DataError, match=why):
        end_tokens(words, DataConfig(tokenizer_model=str(tmp_path)))


def test_a_passage_begins_as_a_text_does(tmp_path):
    save_tokenizer(tmp_path)
    words = HuggingFaceTokenizer(str(tmp_path))
    plain = words.encode
    assert last_word(words, "a bc", True) == ([BEGIN, *plain("a")], plain(" bc"))
    assert last_word(words, "a bc", False) == ([BEGIN, *plain("a b")], plain("c"))
    assert last_word(words, "abc", True) == ([], [])
    assert last_word(words, "a", False) == ([], [])
