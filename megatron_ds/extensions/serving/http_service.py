"""`HttpService`: the HTTP server, uvicorn in a thread of its own.

What a client may cost is bounded: connections at a time, the size of a body, the bytes of all of them, the seconds
until a request has arrived, and those until an answer has left (`Connection`, `body_of`). Requests are read in worker
threads. The generator waits for none of this.
"""

import socket
import threading
from collections.abc import Sequence

import uvicorn

from ...errors import ConfigError
from ...version import __version__
from .application import Serving, application
from .browser_rules import BrowserRules
from .connection import ARRIVAL_SECONDS, Connection
from .generation_loop import GenerationLoop
from .request_body import HeldBytes
from .served_model import ServedModel

BACKLOG = 128


class HttpService:
    """Bound to an address when it is made, and answering after `start`.

    origins: other sites whose pages may use it. Raises ConfigError where the address cannot be bound.
    """

    def __init__(self, host: str, port: int, origins: Sequence[str] = ()):
        self._rules = BrowserRules(host, tuple(origins))
        self._server: uvicorn.Server | None = None
        self.held = HeldBytes()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY where it sees this protocol: without it an answer waits 40 ms for its second part.
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"--host {host} --port {port} cannot be used: {error.strerror or error}. Choose an address of this "
                "machine, and a free port; --port 0 takes any."
            ) from None
        self.address: tuple[str, int] = self.socket.getsockname()[:2]

    @property
    def url(self) -> str:
        """Return the address at which this machine reaches the service."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}"

    def start(self, model: ServedModel, loop: GenerationLoop) -> None:
        """Answer requests in a thread, until `finish`."""
        serving = Serving(model, loop, self.held)
        config = uvicorn.Config(
            application(serving, self._rules),
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,  # lines go where those of the command go
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("Server", f"megatron_ds/{__version__}")],
            timeout_keep_alive=ARRIVAL_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self.socket.listen(BACKLOG)
        self._thread = threading.Thread(
            target=self._server.run, args=([self.socket],), daemon=True
        )
        self._thread.start()

    def finish(self, seconds: int) -> None:
        """Take no further connection, and wait until answers under way have been sent."""
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = seconds
            self._server.should_exit = True
            self._thread.join(seconds + 1)
        self.close()

    def close(self) -> None:
        """Leave the address."""
        self.socket.close()
