"""`HttpService`: the HTTP server. A thread of each connection reads requests, waits for their tokens, and answers.

What a client may cost is bounded: connections at a time, the size of a body, the bytes of all of them, the seconds
until a request has arrived, and those until a part of an answer has left. Large bodies are read one at a time, so that
they take the memory and the processor of one. The generator waits for none of this.
"""

import io
import json
import logging
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...console import shortened
from ...errors import ConfigError
from ...version import __version__
from .browser_rules import PREFLIGHT, BrowserRules
from .refused_request import ABSENT, BROKEN, RefusedRequest
from .request_body import SMALL_BODY, Body, HeldBytes
from .request_fields import read_json
from .routes import ENDPOINTS, JSON_TYPE, PAGES, Reply, Serving, known_path
from .served_text import grow

MOST_CONNECTIONS = 512
ARRIVAL_SECONDS = (
    60.0  # from the answer before, or from the connection, to the whole request
)
SEND_SECONDS = 30.0  # of one write
POLL_SECONDS = 0.1  # between two looks at whether to end
logger = logging.getLogger(__name__)


class HttpService(ThreadingHTTPServer):
    """Bound to an address when it is made, and answering after `start`.

    origins: other sites whose pages may use it. Raises ConfigError where the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    serving: Serving

    def __init__(self, host: str, port: int, origins: Sequence[str] = ()):
        self.browsers = BrowserRules(host, tuple(origins))
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.held = HeldBytes()
        self.large = threading.Lock()  # of the one large body that is being read
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._answers = 0
        self._changed = threading.Condition()
        super().__init__((host, port), Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError as error:
            self.server_close()
            raise ConfigError(
                f"--host {host} --port {port} cannot be used: {error.strerror or error}. Choose an address of this "
                "machine, and a free port; --port 0 takes any."
            ) from None

    def server_bind(self) -> None:
        """Bind without asking a name server, as HTTPServer would."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    @property
    def url(self) -> str:
        """Return the address at which this machine reaches the service."""
        host = self.server_name
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}"

    def start(self, serving: Serving) -> None:
        """Answer requests in threads, until `finish`."""
        self.serving = serving
        self.server_activate()
        threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), daemon=True
        ).start()

    def finish(self, seconds: float) -> None:
        """Take no further connection, and wait until answers under way have been sent."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._answers and time.monotonic() < deadline:
                self._changed.wait(max(deadline - time.monotonic(), 0))
        self.shutdown()
        self.server_close()

    def answering(self) -> "_Answering":
        """Count an answer as under way while the block runs."""
        return _Answering(self)

    def count(self, change: int) -> None:
        """Count answers under way."""
        with self._changed:
            self._answers += change
            self._changed.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; without room for it, refuse it."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        request.setblocking(False)
        try:
            request.send(_TOO_MANY)
        except OSError:
            pass  # the client has left
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and make room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a defect. A client that leaves or stalls is not one, and is handled where it is noticed."""
        logger.exception("a connection of %s failed", client_address)


_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


# What shows whether a client still reads, before an answer has begun and in one.
PROBES = (b"HTTP/1.1 100 Continue\r\n\r\n", b"3\r\n:\n\n\r\n")


class _Answering:
    def __init__(self, service: HttpService):
        self._service = service

    def __enter__(self) -> None:
        self._service.count(1)

    def __exit__(self, *error: object) -> None:
        self._service.count(-1)


class _TimedInput(io.RawIOBase):
    """The input of a connection. All reads have one deadline, which also ends a client that sends single bytes."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(SEND_SECONDS)


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    server_version = f"megatron_ds/{__version__}"
    sys_version = ""
    server: HttpService

    def setup(self) -> None:
        """Read with a deadline, and write with a timeout."""
        super().setup()
        self._input = _TimedInput(self.connection)
        self.rfile = io.BufferedReader(self._input)
        self.connection.settimeout(SEND_SECONDS)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._has_begun = False
        self._has_probed = False

    def handle_one_request(self) -> None:
        """Read and answer a request. A client that leaves or stalls ends the connection alone."""
        self._input.deadline = time.monotonic() + ARRIVAL_SECONDS
        self._has_begun = False
        self._has_probed = False
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log at the level of debugging, one line."""
        logger.debug("%s %s", self.address_string(), shortened(format % args))

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse what is not HTTP, or has a method without a function here."""
        self.close_connection = True
        self._refuse(RefusedRequest(message or HTTPStatus(code).phrase, status=code))

    def _answer(self) -> None:
        """Answer by the table of routes."""
        path = self.path.partition("?")[0]
        # A slash at the end does not matter.
        path = path.rstrip("/") or "/"
        with self.server.answering():
            try:
                self._require_headers()
                with self._body() as body:
                    reply = self._route(path, self._read(body))
                if reply is not None:
                    self._generate(reply)
            except RefusedRequest as refusal:
                self._refuse(refusal)
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:  # a defect: the server goes on, and logs it
                logger.exception("%s %s failed", self.command, path)
                text = f"{type(error).__name__}: {error}"
                self._refuse(RefusedRequest(text, status=BROKEN))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def _require_headers(self) -> None:
        """Raise RefusedRequest for headers that cannot be read to the end: the rest would be taken for the body."""
        self.close_connection, keeps = True, self.close_connection
        if self.headers.defects or self.headers.get_payload():
            raise RefusedRequest(
                "a header has a blank before its colon, or no colon. Send NAME: VALUE."
            )
        is_old = self.request_version == "HTTP/1.0"
        if is_old and "Transfer-Encoding" in self.headers:
            raise RefusedRequest("HTTP/1.0 has no Transfer-Encoding. Use HTTP/1.1.")
        self.close_connection = keeps

    def _route(self, path: str, body: bytes) -> Reply | None:
        """Answer at once, or read what has to be generated. Raises RefusedRequest."""
        # The page of another site is refused before it learns anything else.
        self.server.browsers.require(self.headers)
        known = known_path(path)
        methods = {method for method, one in (*PAGES, *ENDPOINTS) if one == known}
        method = "GET" if self.command == "HEAD" else self.command
        if method == "OPTIONS" and self._cors_headers:
            self._send(200, "text/plain", b"", PREFLIGHT)
            return None
        if not methods:
            raise RefusedRequest(
                f"there is nothing at {path[:200]}. Known: {', '.join(sorted({p for _, p in ENDPOINTS}))}.",
                status=ABSENT,
            )
        if method not in methods:
            raise RefusedRequest(
                f"{path} takes {' or '.join(sorted(methods))}, not {self.command}.",
                status=405,
                headers={"Allow": ", ".join(sorted(methods))},
            )
        # Pages are sent at once; for a text the request is read and returned.
        serving = self.server.serving
        if (method, known) in PAGES:
            kind, content_of = PAGES[method, known]
            self._send(200, kind, content_of(serving, path))
            return None
        read = ENDPOINTS[method, known]
        if len(body) <= SMALL_BODY:
            return read(read_json(body), serving.model)
        with self.server.large:
            return read(read_json(body), serving.model)

    def _body(self) -> Body:
        most = self.server.serving.model.most_body
        return Body(self.rfile, self.headers, most, self.server.held)

    def _read(self, body: Body) -> bytes:
        """Return the bytes of the body. Raises RefusedRequest; what is not read closes the connection."""
        keeps = self.close_connection
        self.close_connection = True
        try:
            return body.read()
        finally:
            if body.is_read:
                self.close_connection = keeps

    def _generate(self, reply: Reply) -> None:
        """Generate, and send the answer whole or as it comes."""
        requests = [part.request for part in reply.parts]
        with self.server.serving.loop.submit(requests) as job:
            grown = grow(job, [part.text for part in reply.parts], self._is_gone)
            if reply.streams:
                self._stream(reply, grown)
                return
            for _ in grown:
                pass
        if not self._is_gone():
            self._send_json(200, reply.whole())

    def _stream(self, reply: Any, grown: Iterator[int]) -> None:
        """Send server-sent events of one JSON object each. After the first one an error is an event, too."""
        self._begin(200, "text/event-stream", {"Cache-Control": "no-store"})
        if self.request_version == "HTTP/1.0":
            self.close_connection = True
        try:
            for chunk in reply.opening():
                self._event(chunk)
            for index in grown:
                for chunk in reply.chunk(index):
                    self._event(chunk)
            for chunk in reply.ending():
                self._event(chunk)
        except RefusedRequest as refusal:
            self._event(refusal.as_json())
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, content: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        """A part of an answer of unknown length; an empty one ends it. HTTP/1.0 ends it with the connection."""
        if self.request_version != "HTTP/1.0":
            data = b"%x\r\n%s\r\n" % (len(data), data)
        self.wfile.write(data)

    def _refuse(self, refusal: RefusedRequest) -> None:
        """Answer with an error, unless an answer has begun."""
        if self._has_begun:
            self.close_connection = True
            return
        self._send_json(refusal.status, refusal.as_json(), refusal.headers)

    def _send_json(
        self, status: int, content: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(status, JSON_TYPE, json.dumps(content).encode() + b"\n", headers)

    def _send(
        self,
        status: int,
        kind: str,
        content: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A whole answer."""
        self._begin(
            status, kind, {"Content-Length": str(len(content)), **(headers or {})}
        )
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self._has_begun = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in (headers | self._cors_headers).items():
            self.send_header(name, value)
        if "Content-Length" not in headers and self.request_version != "HTTP/1.0":
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection and "Connection" not in headers:
            self.send_header("Connection", "close")
        self.end_headers()

    @property
    def _cors_headers(self) -> dict[str, str]:
        """Return the headers that let the page of another site read the answer; {} before the request is read."""
        headers = getattr(self, "headers", None) or {}
        return self.server.browsers.answer_headers(headers.get("Origin"))

    def _is_gone(self) -> bool:
        """Return whether the client has closed its connection. One that sends a next request has not, nor has one
        that only ends its sending: it still reads."""
        connection = self.connection
        try:
            connection.setblocking(False)
            if connection.recv(1, socket.MSG_PEEK):
                return False
            return self._has_hung_up()
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            connection.settimeout(SEND_SECONDS)

    def _has_hung_up(self) -> bool:
        """Return whether a client that has ended its sending also reads no more: its system then refuses what is
        sent, an interim answer, or a comment between events, which every client ignores."""
        if self.request_version == "HTTP/1.0":
            return True
        if not self._has_probed:
            self._has_probed = True
            self.connection.send(PROBES[self._has_begun])
        state = select.poll()
        state.register(self.connection, select.POLLIN)
        found = state.poll(0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in found)
