"""What one client sends costs the others nothing: bodies are bounded before they are parsed, texts before they are
encoded, and chunks are read as RFC 9112 has them."""

import http.client
import json
import re
import socket
import threading
import time

import pytest

from megatron_ds.extensions.serving import (
    accepted_fields,
    application,
    connection,
    http_service,
    request_body,
    request_fields,
)
from megatron_ds.extensions.serving.refused_request import RefusedRequest
from megatron_ds.extensions.serving.request_body import check_structure
from tests.harness.limits import HUNG
from tests.harness.toy_generator import ByteTokenizer, ToyGenerator, serving, until

pytestmark = pytest.mark.threads

CHUNKED = {"Transfer-Encoding": "chunked"}
TEXTS, CHAT, MEGATRON = "/v1/completions", "/v1/chat/completions", "/api"


class Counting(ByteTokenizer):
    """Counts the characters that are encoded."""

    def __init__(self):
        self.encoded = 0

    def encode_batch(self, texts):
        self.encoded += sum(map(len, texts))
        return super().encode_batch(texts)


@pytest.fixture(scope="module")
def served():
    with serving(tokenizer=Counting()) as running:
        yield running


def chat_of(text):
    return {"messages": [{"role": "user", "content": text}]}


REQUESTS = [
    ("POST", TEXTS, lambda text: {"prompt": text}),
    ("POST", TEXTS, lambda text: {"prompt": ["a", text]}),
    ("POST", CHAT, chat_of),
    ("PUT", MEGATRON, lambda text: {"prompts": [text]}),
]


@pytest.mark.parametrize("method, path, body", REQUESTS)
@pytest.mark.parametrize("size", [1_000, 500_000, 15_000_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    served, method, path, body, size
):
    before = served.model.tokenizer.encoded
    status, answer, _ = served.ask(method, path, body("a" * size))
    assert status in (400, 413) and "at most" in answer["error"]["message"]
    assert served.model.tokenizer.encoded - before <= 1
    assert served.ask("GET", "/health")[0] == 200


def test_a_text_as_long_as_the_longest_tokens_allow_is_encoded(served):
    longest = served.model.longest_text
    assert longest == 64 * (len("<begin>") + 1)
    before = served.model.tokenizer.encoded
    _, answer, _ = served.ask("POST", TEXTS, {"prompt": "a" * longest})
    assert "a text has at most 64 tokens" in answer["error"]["message"]
    assert served.model.tokenizer.encoded - before == longest


def test_of_a_long_text_of_long_tokens_a_beginning_is_encoded_first(monkeypatch):
    from megatron_ds.extensions.serving import served_model

    monkeypatch.setattr(served_model, "FIRST_PART", 200)
    words = Counting()
    with serving(ToyGenerator(max_length=64), tokenizer=words) as running:
        answer = running.ask("POST", TEXTS, {"prompt": "a" * 500})[1]
        assert answer["error"]["code"] == "context_length_exceeded"
        assert words.encoded == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[]," * 150_000 + b"[]]}",
        b'{"prompt":[' + b"{}," * 150_000 + b"{}]}",
        b'{"metadata":{' + b",".join(b'"%d":1' % i for i in range(150_000)) + b"}}",
        b'{"prompt":[' + b"1," * 2_100_000 + b"1]}",
        b'{"prompt":[' + b'"",' * 2_100_000 + b'""]}',
    ],
    ids=["lists", "objects", "keys", "ids", "texts"],
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(body, monkeypatch):
    monkeypatch.setattr(request_fields, "from_json", lambda *a, **k: pytest.fail())
    with pytest.raises(RefusedRequest, match="has more than [12].*00,000 "):
        request_fields.read_json(body)


def test_what_strings_hold_is_no_structure():
    text = '[{"' * 100_000 + "\\" * 70_001 + "," * 2_100_000
    content = {"prompt": text, '\\"' * 40_000: [text, "\\"]}
    check_structure(json.dumps(content).encode())
    # The quotes of what follows are found again, at every place of a slice.
    for shift in range(5):
        start = json.dumps(["\\" * (request_body.PIECE // 2 + shift)])[:-1]
        with pytest.raises(RefusedRequest, match="lists"):
            check_structure(f"{start},{'[],' * 150_000}1]".encode())


def test_lists_that_are_too_long_are_refused_before_their_elements_are_looked_at(
    served,
):
    for prompt, words in (([1] * 70, "70 tokens"), ([[1]] * 4097, "4,097 prompts")):
        _, answer, _ = served.ask("POST", TEXTS, {"prompt": prompt})
        assert words in answer["error"]["message"]


def test_a_request_has_no_more_texts_than_the_server_takes():
    from dataclasses import replace

    from megatron_ds.extensions.serving.completions import completions

    words = Counting()
    with serving(tokenizer=words) as running:
        model = replace(running.model, most_texts=8)
        with pytest.raises(RefusedRequest, match="9 texts at once, and .* takes 8"):
            completions({"prompt": ["a", "b", "c"], "n": 3}, model)
    assert words.encoded == 0


def begun(running, data, length):
    """A connection that has sent a part of a body."""
    client = socket.create_connection(running.address, timeout=HUNG)
    head = (
        f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    )
    client.sendall(head.encode() + data)
    return client


def test_large_bodies_share_a_bound_which_the_end_of_a_request_gives_back(monkeypatch):
    monkeypatch.setattr(request_body, "MOST_HELD", 300_000)
    body = json.dumps(
        {"prompt": "a", "max_tokens": 1, "metadata": {"a": "b" * 200_000}}
    )
    with serving() as running:
        ask = lambda text: running.ask("POST", TEXTS, text)
        held = running.service.held
        with begun(running, body[:-1].encode(), len(body)) as first:
            until(lambda: held.count > 190_000)
            status, answer, headers = ask(body)
            assert status == 429 and headers["Retry-After"] == "1"
            assert "of 300,000 bytes" in answer["error"]["message"]
            # What is refused makes room for others, and small ones need no place.
            assert ask(body.replace("b" * 120_000, ""))[0] == 200
            assert ask('{"prompt": "a"}')[0] == 200
            first.sendall(b"}")
            assert first.recv(100).startswith(b"HTTP/1.1 200 ")
        assert ask(body)[0] == 200
        # A client that leaves within its body gives its place back.
        with begun(running, body[:-1].encode(), len(body)):
            until(lambda: held.count > 190_000)
        until(lambda: not held.count)


def test_large_bodies_are_read_one_at_a_time(served, monkeypatch):
    inside = []
    most = []
    lock = threading.Lock()
    read = request_fields.read_json

    def noted(body):
        with lock:
            inside.append(1)
            most.append(len(inside))
        time.sleep(0.01)  # others would begin meanwhile
        found = read(body)
        with lock:
            inside.pop()
        return found

    monkeypatch.setattr(application, "read_json", noted)
    body = {"prompt": "a", "max_tokens": 1, "metadata": {"a": "b" * 100_000}}
    ask = lambda: served.ask("POST", TEXTS, body)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 8 and max(most) == 1


# ------------------------------------------------------------------ chunks
def chunked(served, parts, headers=()):
    """(status, answer, whether the connection is used again) for a body in chunks."""
    client = http.client.HTTPConnection(*served.address, timeout=HUNG)
    client.request("POST", TEXTS, iter(parts), dict(headers), encode_chunked=True)
    answer = client.getresponse()
    found = answer.status, json.loads(answer.read())
    is_kept = client.sock is not None
    if is_kept:
        client.request("GET", "/health")
        assert client.getresponse().status == 200
    client.close()
    return (*found, is_kept)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_in_chunks_is_that_of_its_bytes(served, size):
    body = json.dumps({"prompt": "größer", "max_tokens": 3, "temperature": 0}).encode()
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    status, answer, is_kept = chunked(served, parts, CHUNKED)
    expected = served.ask("POST", TEXTS, body.decode())[1]
    assert (status, is_kept) == (200, True)
    assert answer["choices"] == expected["choices"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_dropped_and_refused(is_chunked):
    with serving() as running:
        most = running.model.most_body
        data = b"a" * (most + (1 << 20))
        if is_chunked:
            parts = [data[at : at + (1 << 16)] for at in range(0, len(data), 1 << 16)]
            status, answer, is_kept = chunked(running, parts, CHUNKED)
            assert is_kept
        else:
            status, answer, _ = running.ask("POST", TEXTS, data)
        assert status == 413 and f"more than {most:,} bytes" in str(answer)


def answers(served, head, data):
    """All that the server sends for a request and no more, up to the end of the connection."""
    with socket.create_connection(served.address, timeout=HUNG) as client:
        client.sendall(f"POST {TEXTS} HTTP/1.1\r\nHost: localhost\r\n".encode())
        client.sendall(head + b"\r\n\r\n" + data)
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:  # it has not read the rest
            pass
    return found


def test_chunks_with_extensions_and_trailers(served):
    data = b'e;a=b\r\n{"prompt": "a"\r\n2 \r\n} \r\n0\r\nX: y\r\n\r\n'
    head = b"Transfer-Encoding: Chunked\r\nConnection: close"
    found = answers(served, head, data)
    assert found.startswith(b"HTTP/1.1 200 ") and found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "data, status",
    [
        (b"2\r\n{}x\r\n0\r\n\r\n", 400),
        (b"-2\r\n{}\r\n", 400),
        (b"0x2\r\n{}\r\n", 400),
        (b"\r\n", 400),
        (b"1" * 21 + b"\r\n", 400),
        (b"1;" + b"a" * 70_000, 431),
        (b"1000001\r\n" + b"a" * 0x1000001, 413),
        (b"0\r\n" + b"A: b\r\n" * 20_000, 431),
        (b"1\r\na\r\n" * 16_385, 413),
    ],
)
def test_chunks_that_are_none(served, data, status):
    found = answers(served, b"Transfer-Encoding: chunked", data)
    # A client that still sends may lose the answer with its connection.
    assert not found or found.startswith(b"HTTP/1.1 %d " % status)
    assert found or len(data) > 90_000
    assert served.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("data", [b"", b"2\r\n{", b"2\r\n{}\r\n", b"0\r\n"])
def test_a_client_that_leaves_within_its_chunks(served, data, caplog):
    with socket.create_connection(served.address, timeout=HUNG) as client:
        head = b"POST /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.replace(b"/api", TEXTS.encode()) + data)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert served.ask("GET", "/health")[0] == 200 and not caplog.records


@pytest.mark.parametrize(
    "head, status",
    [
        (b"Transfer-Encoding: chunked\r\nContent-Length: 2", 400),
        (b"Transfer-Encoding : chunked", 400),
        (b"Transfer-Encoding: chunked, chunked", 501),
        (b"A : b\r\nContent-Length: 2", 400),
        (b"Content-Length: 2\r\nContent-Length: 3", 400),
    ],
)
def test_a_request_whose_end_is_not_certain_is_refused_and_ends_the_connection(
    served, head, status
):
    found = answers(served, head, b"{}")
    assert found.startswith(b"HTTP/1.1 %d " % status)
    assert found.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in found


# ------------------------------------------------------------------ clients that only read
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_sends_no_more_has_its_answer(streams, monkeypatch):
    for module in (connection, http_service):
        monkeypatch.setattr(module, "ARRIVAL_SECONDS", 10 * HUNG)
    with serving(ToyGenerator(max_length=3000, pause=0.001)) as running:
        asked = {"prompt": "a", "max_tokens": 900, "stream": streams, "seed": 1}
        body = json.dumps({**asked, "ignore_eos": True}).encode()
        with begun(running, body, len(body)) as client:
            client.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            found = answer.read().decode()
            # No further request can come.
            assert client.recv(1) == b""
        assert not running.generator.cancelled
        assert "length" in found.rpartition("finish_reason")[2]


# ------------------------------------------------------------------ fields
@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": "low"},
        {"prediction": None},
        {"function_call": "none", "functions": None},
        {"prompt_cache_key": "x"},
        {"add_generation_prompt": True},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": False},
        {"modalities": ["text"], "audio": None},
        {"of_another_program": None},
        {"top_p": 0},
        {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": False},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True},
        {"guided_json": None, "structured_outputs": {}},
        {"typical_p": 1, "mirostat_mode": 0, "cache_prompt": True},
        {"enable_thinking": False, "verbosity": "medium"},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(served, field):
    for slash in ("", "/"):
        status, answer, _ = served.ask("POST", CHAT + slash, {**chat_of("a"), **field})
        assert status == 200, answer


@pytest.mark.parametrize(
    "field, why",
    [
        ({"function_call": {"name": "f"}}, "function_call .* is not supported"),
        ({"continue_final_message": True}, "/v1/completions"),
        ({"add_generation_prompt": False}, "A conversation is answered"),
        ({"guided_json": {"type": "object"}}, "Answers are text"),
        ({"use_beam_search": True}, "sampled or greedy"),
        ({"temperatur": 0.5}, "unknown field 'temperatur'; did you mean"),
        ({"chat_template_kwargs": {"tools": []}}, "has tools, which the server itself"),
        ({"chat_template_kwargs": {"messages": 1}}, "has messages, which the server"),
    ],
)
def test_fields_that_would_change_an_answer_are_refused(served, field, why):
    status, answer, _ = served.ask("POST", CHAT, {**chat_of("a"), **field})
    assert status == 400
    assert re.search(why, answer["error"]["message"])


def test_a_field_without_effect_is_logged_once(served, caplog):
    accepted_fields._log_once.cache_clear()
    for _ in range(3):
        assert served.ask("POST", CHAT, {**chat_of("a"), "priority": 2})[0] == 200
    assert caplog.text.count("the field priority of a request has no effect") == 1


def test_a_setting_of_the_template_reaches_it():
    template = "{{ reasoning_effort }}{{ messages[0].content }}"
    with serving(template=template) as running:
        for field, text in (
            ({"reasoning_effort": "low"}, "lowa"),
            ({"chat_template_kwargs": {"reasoning_effort": "no"}}, "noa"),
        ):
            body = {**chat_of("a"), **field, "max_tokens": 1}
            usage = running.ask("POST", CHAT, body)[1]["usage"]
            assert usage["prompt_tokens"] == len(text)


def test_a_probability_of_0_takes_the_likeliest_token(served):
    asked = {"prompt": "abc", "max_tokens": 5, "seed": 3}
    from megatron_ds.extensions.generation.requests import Sampling
    from megatron_ds.extensions.generation.token_limits import limited
    from megatron_ds.extensions.serving.completions import completions

    reply = completions({**asked, "top_p": 0}, served.model)
    sampling = reply.parts[0].request.sampling
    import torch

    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0 - 1e-9]], dtype=torch.float64)
    assert limited(scores, [sampling]).isfinite().tolist() == [
        [False, True] + [False] * 2
    ]
    assert isinstance(sampling, Sampling)


def test_prompts_of_a_request_have_seeds_of_their_own(served):
    from megatron_ds.extensions.serving.completions import completions
    from megatron_ds.extensions.serving.megatron_text import megatron_text

    body = {"prompt": ["a", "a"], "n": 2, "seed": 7}
    seeds = lambda reply: [part.request.sampling.seed for part in reply.parts]
    assert seeds(completions(body, served.model)) == [7, 8, 9, 10]
    of_megatron = {
        "prompts": ["a", "a", "a"],
        "random_seed": 7,
        "tokens_to_generate": 4,
    }
    assert seeds(megatron_text(of_megatron, served.model)) == [7, 8, 9]


def test_lists_of_the_models_and_paths_end_with_a_slash_or_not(served):
    listed = served.ask("GET", "/v1/models")[:2]
    assert served.ask("GET", "/v1/models/")[:2] == listed
    assert served.ask("GET", "/health/")[0] == 200
