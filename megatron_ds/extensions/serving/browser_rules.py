"""`BrowserRules`: which requests a browser may bring, so that a web page cannot use a server of this machine.

A page of another site can send a request to 127.0.0.1, and the browser then names the page's site as `Origin`. With a
name that its owner points to 127.0.0.1 (DNS rebinding) the page and the server have one origin, and `Host` has that
name. Programs send no `Origin`, and the `Host` of the address that they were given.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...errors import ConfigError
from .refused_request import FORBIDDEN, RefusedRequest

ANY = "*"


@dataclass(frozen=True)
class BrowserRules:
    """host: the address that the server listens at; origins: other sites whose pages may use it, or "*".

    Raises ConfigError for an origin that no browser sends.
    """

    host: str
    origins: tuple[str, ...] = ()

    def __post_init__(self):
        for origin in self.origins:
            if origin != ANY and not _is_origin(origin):
                raise ConfigError(
                    f"--cors-origin {origin} is not the origin of a site. Use scheme, name and port alone, in small "
                    "letters, such as http://localhost:3000; * for all sites."
                )

    def require(self, headers: Mapping[str, str]) -> None:
        """Raise RefusedRequest for the page of another site, and for a name that is not that of this machine."""
        host = headers.get("Host", "")
        if host and is_local(self.host) and not self._is_own(_name_of(host)):
            raise RefusedRequest(
                f"the Host {host[:80]!r} is a name, and this server answers to localhost and to addresses alone, so "
                "that no web page reaches it by a name of its own. Use http://127.0.0.1 and the port; let a proxy "
                "send that Host.",
                status=FORBIDDEN,
            )
        origin = headers.get("Origin")
        if origin is None or self._allows(origin) or _place_of(origin) == host:
            return
        raise RefusedRequest(
            f"a page of {origin[:80]!r} may not use this server. Start the server with --cors-origin and that origin "
            "to allow it.",
            status=FORBIDDEN,
        )

    def _allows(self, origin: str) -> bool:
        return origin in self.origins or ANY in self.origins

    def _is_own(self, name: str) -> bool:
        """Whether the name leads to this machine without a foreign name server, as an address does."""
        return name in ("localhost", self.host.lower()) or _is_address(name)


def is_local(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if not _is_address(host):
        return host.lower() == "localhost"
    return ipaddress.ip_address(host).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_origin(text: str) -> bool:
    """Whether this is how a browser names the site of a page."""
    place = _place_of(text)
    scheme = text.partition(":")[0]
    return place is not None and text == f"{scheme}://{place}".lower()


def _place_of(origin: str) -> str | None:
    """The name and port of an `Origin`; None of one that cannot be read."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """Return the name in a `Host` header without its port; the header itself if it is not valid."""
    try:
        return urlsplit(f"//{host}").hostname or host
    except ValueError:
        return host
