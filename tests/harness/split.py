"""Shards of the tests, which run on different machines: `pytest --shard 3/8`."""

from argparse import ArgumentTypeError
from hashlib import sha256

Shard = tuple[int, int]


def shard_of(text: str) -> Shard:
    """(number from 1, count) of a text such as "3/8". Raises ArgumentTypeError for another text."""
    number, _, count = text.partition("/")
    if number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise ArgumentTypeError(
        f"{text!r} is not a shard; write 3/8 for the third of eight"
    )


def in_shard(test: str, shard: Shard) -> bool:
    """Whether a test belongs to a shard: by a checksum of its name, so that other tests do not move it. Cases of one
    test stay together, since they share what they compare with."""
    number, count = shard
    name = test.partition("[")[0]
    digest = sha256(name.encode()).digest()
    return int.from_bytes(digest) % count == number - 1
