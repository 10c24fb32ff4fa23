"""Random requests to a server: bodies of wrong types, cut JSON, odd headers, clients that leave.

python -m tests.harness.request_fuzz 127.0.0.1 5000 10000      a count of the statuses
"""

import json
import random
import socket
import sys
from collections import Counter

from tests.harness.limits import HUNG

PATHS = (
    ("POST", "/v1/completions", "prompt"),
    ("POST", "/v1/chat/completions", "messages"),
    ("PUT", "/api", "prompts"),
)
GOOD = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "prompts": ["a"],
}
NAMES = (
    "model prompt max_tokens echo logprobs best_of suffix temperature top_p n seed stop stream stream_options "
    "presence_penalty logit_bias user top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos messages "
    "max_completion_tokens top_logprobs chat_template_kwargs tools response_format prompts tokens_to_generate add_BOS "
    "random_seed stop_token beam_width length_penalty stop_on_eol nonsense"
).split()
VALUES = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3.5,
        -0.0,
        1e308,
        10**30,
        10**4000,
        2**63,
        -(2**63),
    ),
    *("", "a", "\ud800", "\x00", "é" * 50, "a" * 5000, "NaN", "{{ 1/0 }}"),
    *([], [[]], [0], [255], [-1], [10**20], [1.5], ["a"], [[1], [2]], ["a", 1], [None]),
    *(
        {},
        {"a": {}},
        {"role": "user"},
        [{"role": "user", "content": 3}],
        [{"role": []}],
    ),
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    {"include_usage": True},
    {"messages": 1},
)
RAW = (
    *(b"", b"{", b"null", b"[]", b'"', b"\xff\xfe", b"\x00" * 10, b"{}" * 3, b"NaN"),
    *(b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b"[" * 100000),
    b'{"prompt": ' * 3000 + b"1" + b"}" * 3000,
    b'{"prompt": "a", "n": ' + b"9" * 6000 + b"}",
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
)
HEADERS = (
    *(b"Content-Length: -1", b"Content-Length: abc", b"Content-Length: 99999999999"),
    *(b"Content-Length: 0x10", b"Content-Length:", b"Transfer-Encoding: chunked"),
    *(b"X: " + b"y" * 70000, b"no colon", b"Content-Length: 5\r\nContent-Length: 2"),
    *(
        b"Expect: 100-continue\r\nContent-Length: 0",
        b"Connection: close",
        b"\xff: \xfe",
    ),
)
LINES = (
    *(
        b"GET / HTTP/1.1",
        b"GET /",
        b"POST /v1/completions HTTP/9.9",
        b"\x16\x03\x01\x02",
    ),
    *(
        b"",
        b"GET  HTTP/1.1",
        b"GET /" + b"a" * 70000 + b" HTTP/1.1",
        b"BREW /api HTTP/1.1",
    ),
    *(
        b"GET /%ff%00?x HTTP/1.1",
        b"HEAD / HTTP/1.1",
        b"GET http://a/ HTTP/1.1",
        b"\r\n",
    ),
    *(
        b"POST /v1/completions HTTP/1.0",
        b"DELETE /health HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
    ),
)


def body_of(draw: random.Random, key: str) -> bytes:
    if draw.random() < 0.2:
        return draw.choice(RAW)
    content = {key: GOOD[key], "max_tokens": 3}
    if key == "prompts":
        content = {key: GOOD[key], "tokens_to_generate": 3}
    for name in draw.sample(NAMES, draw.randint(0, 3)):
        content[name] = draw.choice(VALUES)
    # Texts are short, so that answers are.
    for name in ("max_tokens", "max_completion_tokens", "tokens_to_generate", "n"):
        if type(content.get(name)) is int and 3 < content[name] < 10**4:
            content[name] = 3
    data = json.dumps(content).encode()
    if draw.random() < 0.1:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
    return data


def request_of(draw: random.Random) -> tuple[bytes, bool]:
    """The bytes of a request, and whether its end is where its header puts it."""
    kind = draw.random()
    if kind < 0.1:
        line = draw.choice(LINES) + b"\r\n" + draw.choice((b"", b"A: b\r\n"))
        return line + b"\r\n", False
    method, path, key = draw.choice(PATHS)
    data = body_of(draw, key)
    line = f"{method} {path} HTTP/1.{draw.choice('01')}"
    head = f"{line}\r\nHost: localhost\r\n".encode()
    if kind < 0.2:
        return head + draw.choice(HEADERS) + b"\r\n\r\n" + data, False
    head += b"Connection: close\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    if kind < 0.3:
        return whole[: draw.randrange(len(whole))], False
    return whole, True


def outcome(
    address: tuple[str, int], draw: random.Random, seconds: float = HUNG
) -> str:
    """The status of one request on a connection of its own: a number, "left", "closed" or "stuck"."""
    with socket.create_connection(address, timeout=seconds) as client:
        try:
            data, is_complete = request_of(draw)
            client.sendall(data)
            if draw.random() < 0.1:
                return "left"
            # A server waits for the rest of what is not complete.
            if not is_complete:
                client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        except TimeoutError:
            return "stuck"
        except OSError:
            return "closed"
    if not answer.startswith(b"HTTP/1.1 "):
        return "closed" if not answer else "odd"
    return answer[9:12].decode()


def fuzz(address: tuple[str, int], count: int, seed: int = 0) -> Counter:
    """How often each outcome occurred."""
    draw = random.Random(seed)
    return Counter(outcome(address, draw) for _ in range(count))


if __name__ == "__main__":
    host, port, count = sys.argv[1:4]
    print(fuzz((host, int(port)), int(count), *map(int, sys.argv[4:])))
