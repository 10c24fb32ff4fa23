"""Clients that misbehave cost the server nothing, and its errors and its end are answers, too."""

import http.client
import json
import logging
import socket
import threading

import pytest

from megatron_ds.errors import CommunicationError, ConfigError
from megatron_ds.extensions.serving import connection as connections
from megatron_ds.extensions.serving.browser_rules import BrowserRules
from megatron_ds.extensions.serving.http_service import HttpService
from megatron_ds.extensions.serving.refused_request import RefusedRequest
from tests.harness.limits import HUNG
from tests.harness.request_fuzz import fuzz
from tests.harness.toy_generator import ToyGenerator, serving, until

pytestmark = pytest.mark.threads

PATH = "/v1/completions"
LENGTH = b"Host: localhost\r\nContent-Length: %d\r\n\r\n"
LONG = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    with serving() as running:
        yield running


def raw(served, data):
    """(status, content) of the one answer to some bytes, at which the connection ends."""
    with socket.create_connection(served.address, timeout=HUNG) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        content = answer.read()
        assert client.recv(100) == b""
        return answer.status, content


def test_random_requests_break_nothing(served, caplog):
    before = served.complete(prompt="as before", max_tokens=9, temperature=0)
    with caplog.at_level(logging.WARNING):
        found = fuzz(served.address, 400, seed=1)
    assert not caplog.records
    assert found.keys() <= {
        *("left", "closed", "odd", "100"),
        *("200", "400", "404", "405", "408", "411", "413", "414", "431", "501", "505"),
    }
    assert found["200"] > 40 and found["400"] > 100
    after = served.complete(prompt="as before", max_tokens=9, temperature=0)
    assert after["choices"] == before["choices"]
    until(lambda: not served.generator.running)


@pytest.mark.parametrize(
    "line, data, status, words",
    [
        ("POST /v1/completions", b"Content-Length: 3\r\n\r\n{a}", 400, "not JSON"),
        ("POST /v1/completions", b"Content-Length: 2\r\n\r\n[]", 400, "a JSON list"),
        ("POST /api", b"Content-Length: -1\r\n\r\n", 400, "bad Content-Length"),
        (
            "POST /api",
            b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
            400,
            "conflicting Content-Length",
        ),
        ("POST /api", b"Content-Length: 99999999\r\n\r\n", 413, "at most"),
        ("PUT /api", b"Transfer-Encoding: gzip\r\n\r\n", 501, "chunked is supported"),
        ("GET /v1/completions", b"\r\n", 405, "takes POST"),
        ("POST /v1/embeddings", b"\r\n", 404, "/v1/completions"),
        ("BREW /api", b"\r\n", 501, "BREW"),
        ("GET /", b"X: " + b"y" * 70000 + b"\r\n\r\n", 431, "too long"),
    ],
)
def test_what_is_wrong_with_a_request_is_answered_in_json(
    served, line, data, status, words
):
    request = f"{line} HTTP/1.1\r\nHost: localhost\r\n".encode() + data
    found, content = raw(served, request)
    error = json.loads(content)
    assert found == status
    assert words in error["error"]["message"] == error["message"]


def test_a_connection_serves_several_requests(served):
    connection = http.client.HTTPConnection(*served.address, timeout=HUNG)
    for body in ({"prompt": "a", "max_tokens": 2}, {"prompt": 1}, LONG):
        connection.request("POST", PATH, json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == (400 if body["prompt"] == 1 else 200)
        answer.read()
    connection.close()


def test_an_answer_in_two_parts_does_not_wait_for_an_acknowledgement(served):
    with socket.create_connection(served.address, timeout=HUNG):
        held = served.service._server.server_state.connections
        until(lambda: held)
        used = next(iter(held)).transport.get_extra_info("socket")
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_body_is_read_before_an_error_so_that_a_connection_goes_on(served):
    connection = http.client.HTTPConnection(*served.address, timeout=HUNG)
    for path, status in (("/absent", 404), (PATH, 200)):
        connection.request("POST", path, json.dumps(LONG))
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_texts(streams):
    with serving() as served:
        served.generator.gate.clear()
        body = json.dumps({**LONG, "n": 3, "stream": streams}).encode()
        with socket.create_connection(served.address) as client:
            head = b"POST /v1/completions HTTP/1.1\r\n" + LENGTH
            client.sendall(head % len(body) + body)
            until(lambda: len(served.generator.running) == 3)
        until(lambda: not served.generator.running)
        assert sorted(served.generator.cancelled) == [0, 1, 2]


def test_a_client_that_leaves_ends_its_text_while_tokens_come():
    with serving(ToyGenerator(max_length=10000, pause=0.001)) as served:
        body = json.dumps({**LONG, "max_tokens": 9000}).encode()
        with socket.create_connection(served.address) as client:
            head = b"POST /v1/completions HTTP/1.1\r\n" + LENGTH
            client.sendall(head % len(body) + body)
            until(lambda: served.generator.running)
        until(lambda: not served.generator.running)
        assert served.generator.cancelled == [0]


def test_a_client_that_does_not_read_delays_no_other(served):
    body = json.dumps(
        {"prompt": "b" * 20, "echo": True, "logprobs": 20, "max_tokens": 40, "n": 32}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + LENGTH
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(served.address)
        idle.sendall(head % len(body) + body)
        for _ in range(3):
            assert served.complete(prompt="a", max_tokens=3)["choices"]


def test_a_request_that_does_not_arrive_is_given_up(served, monkeypatch):
    monkeypatch.setattr(connections, "ARRIVAL_SECONDS", 0.3)
    with socket.create_connection(served.address, timeout=HUNG) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n" + LENGTH % 10 + b"{")
        assert client.recv(100) == b""


def test_a_client_that_takes_nothing_for_long_ends_its_texts(monkeypatch):
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.2)
    with serving(ToyGenerator(max_length=4000)) as served:
        asked = {"prompt": "a", "logprobs": 20, "max_tokens": 3000, "n": 8}
        body = json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect(served.address)
            idle.sendall(b"POST /v1/completions HTTP/1.1\r\n" + LENGTH % len(body))
            idle.sendall(body)
            until(lambda: served.generator.running)
            until(lambda: not served.generator.running)
            assert served.generator.cancelled


def test_more_texts_than_there_is_room_for_are_refused_until_there_is():
    with serving(most=4) as served:
        served.generator.gate.clear()
        done = []
        first = threading.Thread(
            target=lambda: done.append(served.complete(**LONG, n=3))
        )
        first.start()
        until(lambda: len(served.generator.running) == 3)
        status, content, headers = served.ask("POST", PATH, {**LONG, "n": 2})
        assert status == 429 and headers["Retry-After"] == "1"
        assert content["error"]["type"] == "rate_limit_error"
        served.generator.gate.set()
        first.join(60)
        assert len(done[0]["choices"]) == 3
        assert served.complete(**LONG, n=2)["choices"]


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with serving() as served:
        held = [socket.create_connection(served.address) for _ in range(2)]
        with socket.create_connection(served.address, timeout=HUNG) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503 ")
        for each in held:
            each.close()

        def answers():
            try:
                return served.ask("GET", "/v1/models")[0] == 200
            except (OSError, http.client.HTTPException, KeyError):
                return False

        until(answers)


@pytest.mark.parametrize("streams", [False, True])
def test_an_error_of_the_generator_reaches_all_clients_and_ends_the_loop(streams):
    with serving() as served:
        served.generator.gate.clear()
        found = []
        ask = lambda: found.append(
            served.ask("POST", PATH, {**LONG, "stream": streams})
        )
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(served.generator.running) == 3)
        failure = CommunicationError("rank 1 exited")
        served.generator.failure = failure
        for thread in threads:
            thread.join(60)
        for status, content, _ in found:
            text = content if streams else json.dumps(content)
            assert status == (200 if streams else 500)
            assert "generation failed" in text and "rank 1 exited" in text
        until(lambda: served.error is failure)
        status, content, _ = served.ask("POST", PATH, LONG)
        assert status == 500 and "rank 1 exited" in content["message"]
        assert served.ask("GET", "/health")[0] == 500


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_without_a_token_is_an_error_of_its_request_alone(streams):
    with serving() as served:
        served.generator.hard = ord("!")
        served.generator.gate.clear()
        bodies = [LONG, {**LONG, "prompt": ["a", "a!", "b"]}, {**LONG, "prompt": "b"}]
        found = {}

        def ask(number):
            body = {**bodies[number], "stream": streams}
            found[number] = served.ask("POST", PATH, body)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(served.generator.running) == 5)
        served.generator.gate.set()
        for thread in threads:
            thread.join(60)
        status, content, _ = found.pop(1)
        text = content if streams else json.dumps(content)
        assert status == (200 if streams else 500)
        assert "no token can follow 33" in text and "generation_failed" in text
        assert all("no token" not in str(content) for _, content, _ in found.values())
        # The other texts of that request are given up, and the server goes on.
        until(lambda: not served.generator.running)
        assert served.complete(**LONG)["usage"]["completion_tokens"] == 50
        assert served.ask("GET", "/health")[0] == 200 and served.error is None


def test_a_model_is_found_by_its_name(served):
    (listed,) = served.ask("GET", "/v1/models")[1]["data"]
    assert served.ask("GET", "/v1/models/toy")[:2] == (200, listed)
    assert served.ask("GET", "/v1/models/t%6Fy")[1] == listed
    for name in ("absent", "toy/1", "%00"):
        status, content, _ = served.ask("GET", f"/v1/models/{name}")
        assert status == 404 and content["error"]["code"] == "model_not_found"
    assert served.ask("DELETE", "/v1/models/toy")[0] == 405


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "192.168.0.7"}, 200),
        ({"Host": "evil.example:5000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "127.0.0.1:5000", "Origin": "http://127.0.0.1:5000"}, 200),
        ({"Host": "127.0.0.1:5000", "Origin": "http://127.0.0.1:8080"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(served, headers, status):
    found, content, sent = served.ask("POST", PATH, LONG, headers)
    assert found == status and not any("Access-Control" in name for name in sent)
    assert status == 200 or "may not use" in str(content) or "a name" in str(content)


def test_a_server_of_all_networks_has_any_name():
    rules = BrowserRules("0.0.0.0")
    rules.require({"Host": "gpu7.example"})
    with pytest.raises(RefusedRequest):
        rules.require({"Host": "gpu7.example", "Origin": "http://evil.example"})


# What a browser asks before it sends JSON to another site.
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type,x-stainless-os",
}


def test_pages_of_an_allowed_site_read_answers_and_errors():
    site = "http://localhost:3000"
    with serving(origins=[site]) as served:
        asked = {"Origin": site, **PREFLIGHT}
        status, _, sent = served.ask("OPTIONS", PATH, headers=asked)
        assert status == 200 and "POST" in sent["Access-Control-Allow-Methods"]
        assert "content-type" in sent["Access-Control-Allow-Headers"]
        for path, wanted in ((PATH, 200), ("/absent", 404)):
            status, _, sent = served.ask("POST", path, LONG, {"Origin": site})
            assert status == wanted and sent["Access-Control-Allow-Origin"] == site
            assert sent["Vary"] == "Origin"
        other = {"Origin": "http://localhost:4000", **PREFLIGHT}
        assert served.ask("OPTIONS", PATH, headers=other)[0] == 403
    with serving(origins=["*"]) as served:
        sent = served.ask("POST", PATH, LONG, {"Origin": "null"})[2]
        assert sent["Access-Control-Allow-Origin"] == "*"
    for wrong in (
        "localhost:3000",
        "http://[::1",
        "http://a/",
        "HTTP://a",
        "http://a b/c",
    ):
        with pytest.raises(ConfigError, match="not the origin of a site"):
            BrowserRules("127.0.0.1", (wrong,))


def test_a_stop_request_finishes_the_texts_under_way_and_takes_no_more():
    with serving() as served:
        served.generator.gate.clear()
        done = []
        first = threading.Thread(target=lambda: done.append(served.complete(**LONG)))
        first.start()
        until(lambda: served.generator.running)
        served.stop.set()
        status, content, headers = served.ask("POST", PATH, LONG)
        assert status == 503 and "shutting down" in content["error"]["message"]
        assert headers["Retry-After"] and headers["Connection"] == "close"
        assert served.ask("GET", "/health")[0] == 503
        served.generator.gate.set()
        first.join(60)
        assert done[0]["usage"]["completion_tokens"] == 50


def test_an_idle_server_steps_now_and_then_so_that_other_ranks_do_not_time_out(
    monkeypatch,
):
    from megatron_ds.extensions.serving import generation_loop

    monkeypatch.setattr(generation_loop, "IDLE_SECONDS", 0.0)
    steps = []

    class Counting(ToyGenerator):
        def step(self):
            steps.append(len(self.running))
            return super().step()

    with serving(Counting(pause=0.01)):
        until(lambda: len(steps) > 2)
    assert set(steps) == {0}  # nothing was under way


def test_an_address_that_is_taken_is_an_error():
    first = HttpService("127.0.0.1", 0)
    first.socket.listen()
    _, port = first.address
    with pytest.raises(ConfigError, match=f"--port {port} cannot be used"):
        HttpService("127.0.0.1", port)
    first.close()
    with pytest.raises(ConfigError, match="--host nowhere.invalid"):
        HttpService("nowhere.invalid", 0)
