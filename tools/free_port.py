"""A port for ranks that are about to start."""

import contextlib
import random
import socket


def free_port() -> int:
    """A free port of 127.0.0.1, below those that Linux gives to outgoing connections: any program's next
    connection could take one of those before the ranks listen at it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
