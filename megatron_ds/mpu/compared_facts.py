"""What `require_agreement` does with several ranks: `compare` exchanges hashes, and values where these differ.

Equal ranks exchange one hash each. Only when hashes differ do two ranks show their values: the lowest rank
of the largest set of equal ranks, and the lowest rank outside of that set.
"""

import hashlib
import json
import platform
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ConfigError
from .agree import gather_from_all_ranks
from .collectives import all_gather_object
from .group import Group

MOST_NAMED = 3  # differences in the message
MOST_CHARACTERS = 200  # of a value in the message
MISSING = "absent"  # value in the message of a name that one rank does not have
Facts = Mapping[str, tuple[Any, str]]
"""name → (value of types that JSON has, its source for the message or "")"""


def compare(world: Group, read: Callable[[], Facts], problem: str, advice: str) -> None:
    """Raise the same ConfigError on all ranks unless their facts are equal; as `require_agreement` does."""
    # All ranks read, and exchange one hash each.
    facts: dict[str, tuple[Any, str]] = {}

    def read_and_hash() -> str:
        """Read the facts of this rank into `facts`."""
        facts.update(read())
        return _hash_of(facts)

    hashes = gather_from_all_ranks(world, read_and_hash)
    if len(set(hashes)) == 1:
        return
    # Two ranks send their facts; those of all ranks could be gigabytes.
    one, other = _two_that_differ(hashes)
    mine = _packed(facts) if world.rank in (one, other) else b""
    sent = all_gather_object(mine, world)
    # All ranks raise, with what the two sent.
    sides = [_Side(world.ranks[at], *_unpacked(sent[at])) for at in (one, other)]
    text = _differences(*sides)
    count = sum(found != hashes[one] for found in hashes)
    others = ""
    if count > 1:
        usual = world.ranks[one]
        others = f" ({count} of {world.size} ranks differ from rank {usual}.)"
    error: Any = ConfigError(f"{problem}: {text}.{others} {advice}")
    error.on_all_ranks = True
    raise error


class _Side(NamedTuple):
    """What one of the two ranks sent.

    facts  name → [value, source]
    """

    rank: int
    host: str
    facts: dict[str, list]

    def shown(self, name: str) -> str:
        """Return the value of a name with its source, rank and host."""
        value, source = self.facts.get(name, (MISSING, ""))
        # Long values are cut.
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]}…"
        where = f"{text} on rank {self.rank} on {self.host}"
        if not source:
            return where
        origin = source if source == "default" else f"from {source}"
        return f"{where} ({origin})"


def _hash_of(facts: Facts) -> str:
    """Return a hash of names and values, without their sources."""
    values = {name: value for name, (value, _) in facts.items()}
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _two_that_differ(hashes: Sequence[str]) -> tuple[int, int]:
    """(lowest rank of the most frequent hash, lowest rank with another hash); ties go to the lower rank."""
    usual, _ = Counter(hashes).most_common(1)[0]
    others = (at for at, found in enumerate(hashes) if found != usual)
    return hashes.index(usual), next(others)


def _packed(facts: Facts) -> bytes:
    """This host's name and the facts, compressed."""
    return zlib.compress(json.dumps([platform.node(), facts]).encode())


def _unpacked(sent: bytes) -> tuple[str, dict[str, list]]:
    """(host, facts) of `_packed`."""
    host, facts = json.loads(zlib.decompress(sent))
    return host, facts


def _differences(one: _Side, other: _Side) -> str:
    """Return the first names whose values differ, with the values of both sides."""
    text = lambda side, name: json.dumps(side.facts.get(name, [MISSING])[0])
    names = []
    for name in {**one.facts, **other.facts}:
        if text(one, name) != text(other, name):
            names.append(name)
    # The first ones are named, the others counted.
    named = []
    for name in names[:MOST_NAMED]:
        here = one.shown(name)
        there = other.shown(name)
        named.append(f"{name} is {here}, and {there}")
    if len(names) > MOST_NAMED:
        named.append(f"and {len(names) - MOST_NAMED} more values differ")
    return "; ".join(named)
