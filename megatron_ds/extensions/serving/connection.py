"""`Connection`: a connection of uvicorn, with bounds of number, bytes and seconds, and for half-closed clients.

    MOST_CONNECTIONS  at a time; another one is answered with status 503
    ARRIVAL_SECONDS   from the answer before, or from the connection, to the whole request
    SEND_SECONDS      in which a client takes what waits for it
    MOST_BODY, MOST_CHUNKS   of a request, of which an event loop drops the rest otherwise without end

What is not HTTP is answered in JSON, with the status that h11 names.
"""

import asyncio
import json
import select
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .refused_request import TOO_LARGE, RefusedRequest
from .served_model import MOST_BODY

MOST_CONNECTIONS = 512
MOST_CHUNKS = 1 << 14  # to read as many takes a third of a second
MOST_HEADERS = 64 << 10  # bytes
HEADERS_TOO_LARGE = 431
ARRIVAL_SECONDS = 60
SEND_SECONDS = 30
POLL_SECONDS = 0.2  # between two looks at a client that sends no more
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
# What shows whether a client still reads, before an answer has begun, and in one that comes in chunks.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"
STREAMS = "megatron_ds.streams"  # in the scope of a request whose answer takes comments


class BoundedParser(h11.Connection):
    """h11's, which ends with a request that is too large, or whose end is not certain (RFC 9112, section 6)."""

    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        """Return the next event of the client. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            self._check_headers(event)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._add(len(event.data))
        return event

    def _check_headers(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        if sum(map(len, [*headers, *headers.values()])) > MOST_HEADERS:
            raise h11.RemoteProtocolError(
                f"its headers are too long: at most {MOST_HEADERS:,} bytes",
                error_status_hint=HEADERS_TOO_LARGE,
            )
        if b"transfer-encoding" not in headers:
            self._add(int(headers.get(b"content-length", b"0")))
            self._bytes = 0
        elif b"content-length" in headers:
            raise h11.RemoteProtocolError(
                "Content-Length and Transfer-Encoding contradict each other. Send one"
            )
        elif request.http_version == b"1.0":
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")

    def _add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MOST_BODY or self._chunks > MOST_CHUNKS:
            raise h11.RemoteProtocolError(
                f"a body has at most {MOST_BODY:,} bytes, in at most {MOST_CHUNKS:,} chunks",
                error_status_hint=TOO_LARGE,
            )


class Connection(H11Protocol):
    """A connection, made by uvicorn."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = BoundedParser(h11.SERVER, MOST_HEADERS)
        self._arrival: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._has_ended = False  # whether the client sends no more

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; without room for the connection, refuse it."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(TOO_MANY)
            transport.close()
            return
        self._set_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waiting."""
        super().connection_lost(exc)
        for timer in (self._arrival, self._sending):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        """Handle what has arrived, and wait for the rest of a request only."""
        super().handle_events()
        self._set_arrival()

    def _set_arrival(self) -> None:
        is_waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waiting and self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_SECONDS, self.transport.abort)
        elif not is_waiting and self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def pause_writing(self) -> None:
        """Begin to wait for a client that takes less than it gets."""
        super().pause_writing()
        self._sending = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """End this waiting."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, of which h11's error is being handled, and end the connection."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if self.cycle is not None:
            # Its request has no end, and needs no answer of its own.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = RefusedRequest(f"the request cannot be read: {error}.")
            body = json.dumps(refusal.as_json()).encode()
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
            }
            status = error.error_status_hint
            answer = h11.Response(status_code=status, headers=[*headers.items()])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def eof_received(self) -> Any:
        """Return whether a client that sends no more still has an answer to read, and look whether it does."""
        cycle = self.cycle
        is_old = self.scope is not None and self.scope["http_version"] == "1.0"
        if cycle is None or cycle.response_complete or cycle.more_body or is_old:
            return False
        if not self._has_ended:
            self._has_ended = True
            self.loop.call_later(POLL_SECONDS, self._probe)
        return True

    def _probe(self) -> None:
        """Send what a client ignores, if it still reads."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(INTERIM)
        elif STREAMS in self.scope:
            self.transport.write(COMMENT)
        self._look()

    def _look(self) -> None:
        """End the connection of a client that reads no more: its system refuses what is sent."""
        if self.transport.is_closing():
            return
        state = select.poll()
        state.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in state.poll(0)):
            self.transport.abort()
            return
        self.loop.call_later(POLL_SECONDS, self._look)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client sends no more."""
        super().on_response_complete()
        if self._has_ended and self.cycle.response_complete:
            self.transport.close()
