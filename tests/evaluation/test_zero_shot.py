"""Megatron's zero-shot tasks: published figures, windows against brute force, and the plain text of files."""

import json
import math

import pytest
import torch

from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.evaluation.detokenizers import DETOKENIZERS
from megatron_ds.extensions.evaluation.evaluate import run_tool
from megatron_ds.extensions.evaluation.scorer import Scored
from megatron_ds.extensions.evaluation.zero_shot import (
    lambada,
    last_word,
    perplexity,
    wikitext103,
    windows,
)

pytestmark = pytest.mark.plan

WORDS = NullTokenizer(50)


def score(requests):
    """A model whose log-probability depends on all tokens before, so that a lost context shows. It expects the
    last token again, plus one."""
    found = []
    for request in requests:
        first = len(request.tokens) - request.scored
        values = [
            log_prob(request.tokens[:at], request.tokens[at])
            for at in range(first, len(request.tokens))
        ]
        likeliest = [
            request.tokens[at - 1] + 1 for at in range(first, len(request.tokens))
        ]
        is_greedy = likeliest == list(request.tokens[first:])
        found.append(Scored(torch.tensor(values), torch.tensor(likeliest), is_greedy))
    return found


def log_prob(before, token):
    return (
        -math.fmod(sum((i + 1) * t for i, t in enumerate(reversed(before))), 7)
        - token / 100
    )


def test_perplexities_are_those_of_megatron():
    """A sum of 1000 over 301 tokens of 251 words."""
    found = perplexity(1000.0, 301, 251)
    assert found.perplexity == pytest.approx(28.031625, abs=1e-6)
    assert found.token_ratio == pytest.approx(1.2)
    assert found.adjusted_perplexity == pytest.approx(54.598150, abs=1e-6)
    assert perplexity(1e6, 301, 251).perplexity == math.exp(20)


@pytest.mark.parametrize("length, stride", [(8, 8), (8, 3), (8, 1), (7, 5), (40, 32)])
@pytest.mark.parametrize("count", [2, 7, 8, 9, 10, 33, 41])
def test_windows_score_each_token_once_with_the_context_that_megatron_gives_it(
    length, stride, count
):
    tokens = [(7 * i + i * i) % 50 for i in range(count)]
    found = [
        value
        for request, scored in zip(
            windows(tokens, length, stride), score(windows(tokens, length, stride))
        )
        for value in scored.log_probs.tolist()
        if len(request.tokens) <= length + 1
    ]
    expected = []
    for at in range(1, count):
        # The first window that reads up to this token begins at a multiple of the stride.
        window = max(0, math.ceil((at - length) / stride))
        expected.append(log_prob(tokens[window * stride : at], tokens[at]))
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_perplexity_of_a_file_is_that_of_its_windows(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(" ".join(str(i % 50) for i in range(100)) + "\n")
    found = wikitext103(score, WORDS, path, length=16, stride=4, detokenizer="none")
    ids = [i % 50 for i in range(100)]
    total = sum(s.total for s in score(windows(ids, 16, 4)))
    assert found["loss"] == pytest.approx(-total / 99)
    assert (found["tokens"], found["words"], found["token_ratio"]) == (100, 100, 1.0)


def test_strict_and_other_last_words(tmp_path):
    class Letters:
        eod = 0

        def encode_batch(self, texts):
            return [list(text.encode()) for text in texts]

    assert last_word(Letters(), "a bc", strict=False) == ([97, 32, 98], [99])
    assert last_word(Letters(), " a  bc ", strict=True) == ([97], [32, 98, 99])
    path = tmp_path / "lambada.jsonl"
    lines = ["1 2 3", "1 2 4", "", "6 7 8 9 10"]
    path.write_text("\n".join(line and json.dumps({"text": line}) for line in lines))
    for strict in (False, True):
        found = lambada(score, WORDS, path, length=4, strict=strict)
        assert (found["correct"], found["passages"]) == (2, 3)
        assert found["shortened"] == 0
    assert lambada(score, WORDS, path, length=3, strict=True)["shortened"] == 1


def test_a_target_does_not_begin_with_the_token_that_begins_texts():
    class Beginning:
        beginning = (1,)

        def encode_batch(self, texts):
            return [[1, *text.encode()] for text in texts]

    assert last_word(Beginning(), "a b", strict=True) == ([1, 97], [32, 98])


def test_passages_are_lines_that_end_with_a_line_feed_alone(tmp_path):
    """JSON allows other line separators, such as U+2028, inside of a text."""
    path = tmp_path / "lambada.jsonl"
    path.write_bytes('\ufeff{"text": "1\u2028 2 3"}\r\n{"text": "1 2"}'.encode())
    found = lambada(score, WORDS, path, length=4, strict=True)
    assert (found["correct"], found["passages"]) == (2, 2)


@pytest.mark.parametrize(
    "flags, why",
    [
        ("--task WIKITEXT103 --overlapping-eval 0", "--overlapping-eval 0: use 1 or"),
        ("--task WIKITEXT103 --strict-lambada", "no effect with --task WIKITEXT103"),
        ("--task LAMBADA --overlapping-eval 4", "no effect with --task LAMBADA"),
        ("--task LAMBADA --num-fewshot 0", "--num-fewshot has no effect"),
        ("--tasks a --limit 0", "--limit 0: use 1 or more"),
        ("--tasks a --valid-data f", "--valid-data has no effect with --tasks"),
    ],
)
def test_flags_without_effect_and_sizes_out_of_range_are_refused(flags, why):
    with pytest.raises(ConfigError, match=why):
        run_tool(["--load", "absent", *flags.split()])


def test_what_cannot_be_evaluated_is_an_error(tmp_path):
    path = tmp_path / "text"
    path.write_text("1")
    with pytest.raises(DataError, match="has 1 tokens; scoring needs 2"):
        wikitext103(score, WORDS, path, length=4, stride=2, detokenizer="none")
    with pytest.raises(ConfigError, match="Use 1 to 4"):
        wikitext103(score, WORDS, path, length=4, stride=5)
    with pytest.raises(DataError, match=r"text:1: cannot read"):
        lambada(score, WORDS, path, length=4, strict=False)
    path.write_text('{"text": 1}')
    with pytest.raises(DataError, match=r"text:1: cannot read"):
        lambada(score, WORDS, path, length=4, strict=False)
    path.write_text('{"text": "1 \\ud800"}')
    with pytest.raises(DataError, match=r"text:1: cannot read"):
        lambada(score, WORDS, path, length=4, strict=False)
    path.write_text('{"text": "1"}')
    with pytest.raises(DataError, match="nothing before its last one"):
        lambada(score, WORDS, path, length=4, strict=False)
    with pytest.raises(DataError, match="cannot be read"):
        lambada(score, WORDS, tmp_path / "absent", length=4, strict=False)


@pytest.mark.parametrize(
    "name, separated, plain",
    [
        ("wikitext", "the boys ' dog", "the boys' dog"),
        ("wikitext", "' so ' it 's", "'so' it's"),
        ("wikitext", "10 @,@ 000 @.@ 5 twenty @-@ one", "10,000.5 twenty-one"),
        ("wikitext", "a , b ; c : d . e ! f ? g", "a, b; c: d. e! f? g"),
        ("wikitext", '( a ) [ b ] { c } " d "', '(a) [b] {c} "d"'),
        ("wikitext", " \n = = Title = = \n ", "\n== Title ==\n"),
        ("wikitext", "5 ° C , N of", "5°C, 1 of"),
        ("ptb", "it 's n't $ N million \n", "it'sn't $1 million\n"),
        ("none", "as ( it ) is", "as ( it ) is"),
    ],
)
def test_separated_tokens_become_text(name, separated, plain):
    assert DETOKENIZERS[name](separated) == plain
