"""/v1/completions and /v1/chat/completions, over a generator without a model."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.toy_generator import (
    END,
    ByteTokenizer,
    ToyGenerator,
    scores_after,
    serving,
)

pytestmark = pytest.mark.threads

WORDS = ByteTokenizer()


@pytest.fixture(scope="module")
def served():
    with serving(ToyGenerator(max_length=400)) as running:
        yield running


def greedy(prompt, count):
    """The likeliest tokens after some, one at a time, up to the end of a document."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != END:
        scores = scores_after(tokens, 258)
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]


def text_of(tokens):
    return WORDS.decode([token for token in tokens if token != END])


def chunks_of(served, path, body):
    """The JSON of each event of a stream, which must end as OpenAI's do."""
    status, content, headers = served.ask("POST", path, {**body, "stream": True})
    assert status == 200, content
    assert headers["Content-Type"] == "text/event-stream"
    events = content.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_a_greedy_text_is_that_of_the_model(served):
    answer = served.complete(prompt="Once", max_tokens=12, temperature=0)
    expected = greedy(b"Once", 12)
    (choice,) = answer["choices"]
    assert choice["text"] == text_of(expected)
    assert choice["finish_reason"] == ("stop" if END in expected else "length")
    assert choice["logprobs"] is None
    usage = {"prompt_tokens": 4, "completion_tokens": len(expected)}
    assert answer["usage"] == {**usage, "total_tokens": 4 + len(expected)}


def test_tokens_lists_and_copies_are_choices_in_order(served):
    ids = [list(b"one"), list(b"other")]
    answer = served.complete(prompt=ids, max_tokens=5, temperature=0, n=2)
    texts = [text_of(greedy(prompt, 5)) for prompt in ids for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 8
    of_texts = served.complete(
        prompt=["one", "other"], max_tokens=5, temperature=0, n=2
    )
    assert of_texts["choices"] == answer["choices"]
    alone = served.complete(prompt=ids[0], max_tokens=5, temperature=0)
    assert alone["choices"] == answer["choices"][:1]


def test_a_seed_repeats_a_text_and_copies_differ(served):
    asked = {"prompt": "a", "max_tokens": 20, "n": 3, "ignore_eos": True}
    first = served.complete(**asked, seed=-5)["choices"]
    assert served.complete(**asked, seed=-5)["choices"] == first
    assert len({choice["text"] for choice in first}) == 3
    assert served.complete(**asked)["choices"] != served.complete(**asked)["choices"]


def test_an_echo_scores_the_prompt(served):
    answer = served.complete(
        prompt="Hé", max_tokens=3, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer["choices"]
    new = greedy("Hé".encode(), 3)
    tokens = [*"Hé".encode(), *new]
    found = choice["logprobs"]
    assert choice["text"] == "Hé" + text_of(new)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place in range(1, len(tokens)):
        scores = scores_after(tokens[:place], 258)
        log_prob = found["token_logprobs"][place]
        assert log_prob == pytest.approx(scores[tokens[place]])
        assert max(found["top_logprobs"][place].values()) == max(scores)
    # Bytes of a character are one text, of the last of them.
    assert found["tokens"][:3] == ["H", "", "é"]
    assert found["text_offset"][:4] == [0, 1, 1, 2]


def test_a_prompt_can_be_scored_without_a_continuation(served):
    asked = {"prompt": "score me", "echo": True, "logprobs": 1}
    answer = served.complete(**asked, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "score me" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 8
    assert answer["usage"]["completion_tokens"] == 0
    longer = served.complete(**asked, max_tokens=1)["choices"][0]["logprobs"]
    assert longer["token_logprobs"][:8] == choice["logprobs"]["token_logprobs"]


def test_a_text_ends_before_a_stop_string(served):
    asked = {"prompt": "stop", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = served.complete(**asked)["choices"][0]["text"]
    stop = whole[8:11]
    (choice,) = served.complete(**asked, stop=["absent", stop])["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    streamed = chunks_of(served, "/v1/completions", {**asked, "stop": stop})
    assert "".join(c["choices"][0]["text"] for c in streamed) == choice["text"]


def test_a_stop_token_ends_a_text_and_is_not_in_it(served):
    tokens = greedy(b"xyz", 30)
    stop = tokens[6]
    (choice,) = served.complete(
        prompt="xyz", max_tokens=30, temperature=0, stop_token_ids=[stop], logprobs=0
    )["choices"]
    cut = tokens[: tokens.index(stop)]
    assert choice["text"] == text_of(cut) and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(cut) + 1


def test_a_stream_has_the_whole_answer_in_parts(served):
    asked = {
        "prompt": ["Once", "Now"],
        "max_tokens": 15,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
    }
    whole = served.complete(**asked)
    chunks = chunks_of(
        served, "/v1/completions", {**asked, "stream_options": {"include_usage": True}}
    )
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {part["usage"] for part in parts} == {None}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        mine = [
            part["choices"][0]
            for part in parts
            if part["choices"][0]["index"] == choice["index"]
        ]
        assert len(mine) > 1
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [v for p in mine for v in p["logprobs"][name]] == values


def test_a_conversation_is_continued_behind_its_template(served):
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_tokens": 9, "temperature": 0}
    status, answer, _ = served.ask(
        "POST",
        "/v1/chat/completions",
        {**asked, "logprobs": True, "top_logprobs": 2},
    )
    assert status == 200, answer
    prompt = b"[user]Hi<end>[assistant]"
    expected = greedy(prompt, 9)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text_of(expected)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    first = choice["logprobs"]["content"][0]
    scores = scores_after(prompt, 258)
    assert first["logprob"] == pytest.approx(max(scores))
    assert len(first["top_logprobs"]) == 2
    # In chunks: the role, then the text, then the end.
    chunks = chunks_of(served, "/v1/chat/completions", asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_requests_at_the_same_time_have_the_answers_of_single_ones(served):
    prompts = [f"text {number}" for number in range(24)]
    ask = lambda prompt: served.complete(prompt=prompt, max_tokens=20, temperature=0)
    alone = [ask(prompt)["choices"] for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        together = [answer["choices"] for answer in pool.map(ask, prompts)]
    assert together == alone


def test_the_model_is_listed_and_named(served):
    status, models, _ = served.ask("GET", "/v1/models?limit=1")
    assert status == 200 and [m["id"] for m in models["data"]] == ["toy"]
    assert served.ask("GET", "/health")[:2] == (200, {"status": "ok"})
    assert served.complete(prompt="a", max_tokens=1, model="toy")["model"] == "toy"
    status, error, _ = served.ask(
        "POST", "/v1/completions", {"prompt": "a", "model": "gpt"}
    )
    assert status == 404 and error["error"]["code"] == "model_not_found"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "path, body, param, words",
    [
        (COMPLETIONS, {}, "prompt", "no 'prompt'"),
        (COMPLETIONS, {"prompt": None}, "prompt", "no 'prompt'"),
        (COMPLETIONS, {"prompt": 3}, "prompt", "must be a string, a list"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty list"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty list"),
        (COMPLETIONS, {"prompt": [258]}, "prompt", "vocabulary is 0 to 257"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 400}, "prompt", "at most 400"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "an integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "an integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "without echo"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "0 to 100"),
        (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, "temperature", "range"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "1 to 128"),
        (COMPLETIONS, {"prompt": "a", "n": 65}, None, "65 texts at once"),
        (COMPLETIONS, {"prompt": ["a"] * 33, "n": 128}, "prompt", "are 4,224 texts"),
        (
            COMPLETIONS,
            {"prompt": "a", "min_tokens": 17},
            "min_tokens",
            "at most 16 new tokens",
        ),
        (
            CHAT,
            {**HI, "max_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "min_tokens is 3, and the text has at most 2",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "stop_token_ids": [258]},
            "stop_token_ids",
            "token 258, and the vocabulary is 0 to 257",
        ),
        (CHAT, {**HI, "stop_token_ids": [-1]}, "stop_token_ids", "0 to 257"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop", "list of strings"),
        (COMPLETIONS, {"prompt": "a", "stop": "s" * 257}, "stop", "257 characters"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias", "not"),
        (COMPLETIONS, {"prompt": "a", "top_q": 1}, "top_q", "did you mean 'top_"),
        (
            COMPLETIONS,
            {"prompt": "a", "presence_penalty": 1},
            "presence_penalty",
            "repetition_penalty",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "stream_options": {"include_usage": True}},
            "stream_options",
            "without stream",
        ),
        (CHAT, {"messages": []}, "messages", "1 to 4,096"),
        (CHAT, {"messages": ["Hi"]}, "messages", "list of one or more messages"),
        (CHAT, {"messages": [{"role": "cat"}]}, "messages", "role 'cat'"),
        (CHAT, {**HI, "tools": [{}]}, "tools", "not supported"),
        (
            CHAT,
            {**HI, "response_format": {"type": "json_object"}},
            "response_format",
            "not",
        ),
        (CHAT, {**HI, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ],
)
def test_a_wrong_field_is_named(served, path, body, param, words):
    status, content, _ = served.ask("POST", path, body)
    error = content["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and words in error["message"]


def test_a_template_that_does_not_end_is_refused_while_other_requests_are_answered():
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    with serving(template=endless) as served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.ask, "POST", CHAT, HI)
        assert served.complete(prompt="a", max_tokens=2)["choices"]
        assert served.ask("GET", "/health")[0] == 200
        # It has 1 s of a processor, for which both compete.
        assert not asked.done()
        status, content, _ = asked.result(120)
    assert status == 400
    assert "took more than 1 s of a processor" in content["error"]["message"]


def test_without_a_template_a_conversation_is_refused():
    with serving(template=None) as served:
        status, content, _ = served.ask("POST", CHAT, HI)
        assert status == 400 and "--chat-template" in content["error"]["message"]


def test_log_probs_are_numbers_of_json(served):
    """An impossible token has a finite one."""
    from megatron_ds.extensions.serving.served_tokens import entry_of

    entry = entry_of(WORDS, "a", 97, -math.inf, ((98, 0.0), (99, math.nan)))
    json.dumps(entry.alternatives, allow_nan=False)
    assert entry.log_prob == -9999.0
