"""PUT /api of Megatron's text generation server, over a generator without a model."""

import pytest

from tests.harness.toy_generator import END, ToyGenerator, scores_after, serving

pytestmark = pytest.mark.threads


@pytest.fixture(scope="module")
def served():
    with serving(ToyGenerator(max_length=200)) as running:
        yield running


def put(served, **body):
    status, content, _ = served.ask("PUT", "/api", body)
    assert status == 200, content
    return content


def test_what_megatrons_client_sends_is_answered_with_texts(served):
    answer = put(served, prompts=["Hello"], tokens_to_generate=8)
    assert answer["text"][0].startswith("Hello")
    assert set(answer) == {"text", "segments", "logprobs"} and not answer["logprobs"]
    assert "".join(answer["segments"][0][:5]) == "Hello"


def test_log_probs_are_those_of_all_tokens_but_the_first(served):
    asked = {"prompts": ["abc", "xy"], "top_k": 1, "stop_token": 0}
    answer = put(served, **asked, tokens_to_generate=4, logprobs=True)
    tokens = list(b"abc")
    expected = []
    for place in range(1, 7):
        scores = scores_after(tokens[:place], 258)
        if place == len(tokens):
            tokens.append(scores.index(max(scores)))
        expected.append(scores[tokens[place]])
    assert answer["logprobs"][0] == pytest.approx(expected)
    assert len(answer["segments"][0]) == 7 and len(answer["logprobs"][1]) == 5
    # The prompt alone.
    alone = put(served, **asked, tokens_to_generate=0, logprobs=True)
    assert alone["text"] == ["abc", "xy"]
    assert alone["logprobs"] == [answer["logprobs"][0][:2], answer["logprobs"][1][:1]]


def test_a_seed_repeats_texts_and_without_one_they_differ(served):
    ask = lambda **more: put(
        served, prompts=["a"], tokens_to_generate=30, stop_token=0, **more
    )["text"]
    assert ask(random_seed=4) == ask(random_seed=4) != ask(random_seed=5)
    assert ask() != ask()


def test_an_end_of_line_ends_a_text(served):
    for seed in range(400):
        asked = {"prompts": ["a"], "tokens_to_generate": 60, "random_seed": seed}
        whole = put(served, **asked)["text"][0]
        if "\n" in whole:
            break
    assert put(served, **asked, stop_on_eol=True)["text"] == [whole.split("\n")[0]]
    assert put(served, **asked, stop_on_double_eol=True)["text"] == [whole]


def test_an_empty_prompt_needs_a_token_in_front(served):
    answer = put(
        served, prompts=[""], add_BOS=True, tokens_to_generate=1, logprobs=True
    )
    assert len(answer["logprobs"][0]) == 1
    answer = put(
        served, prompts=["a"], add_BOS=True, tokens_to_generate=0, logprobs=True
    )
    expected = scores_after([END], 258)[ord("a")]
    assert answer["logprobs"][0] == pytest.approx([expected])


@pytest.mark.parametrize(
    "body, words",
    [
        ({}, "no 'prompts'"),
        ({"prompts": "a"}, "a list of strings"),
        ({"prompts": []}, "1 to 128"),
        ({"prompts": ["a"] * 129}, "1 to 128"),
        ({"prompts": [""]}, "add_BOS"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "0 to"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "logprobs"),
        ({"prompts": ["a"], "tokens_to_generate": 300}, "at most 200"),
        ({"prompts": ["a"], "temperature": 0.0}, "above 0"),
        ({"prompts": ["a"], "temperature": 101}, "0 to 100"),
        ({"prompts": ["a"], "top_k": 1.0}, "an integer"),
        ({"prompts": ["a"], "top_k": 1001}, "0 to 1,000"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "Choose one"),
        ({"prompts": ["a"], "beam_width": 2}, "beam_width 2 is not supported"),
        ({"prompts": ["a"], "top_p": 0.9, "top_p_decay": 0.5}, "top_p_decay 0.5"),
        ({"prompts": ["a"], "stop_token": 258.5}, "an integer"),
        ({"prompts": ["a"], "stop_token": 258}, "stop_token has the token 258"),
        ({"prompts": ["a"], "random_seed": -2}, "-1 to"),
        ({"prompts": ["a"], "max_len": 3}, "unknown field 'max_len'"),
    ],
)
def test_a_wrong_field_is_an_error_of_status_400(served, body, words):
    status, content, _ = served.ask("PUT", "/api", body)
    assert status == 400 and words in content["error"]["message"]
