"""`Launch`: what a launcher tells a process about its ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

DEFAULT_PORT = 29500
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """Global rank, rank on this host, numbers of ranks, address of rank 0, and the launcher's name.

    file: where ranks meet instead of the address, "" if they meet there
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    source: str = "none"
    file: str = ""


def integer_in(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a number of the environment. Raises ConfigError unless it is one, or absent with a default."""
    text = env.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not an integer; the launcher should set "
            "it."
        ) from None
