"""GPT-2's letters for bytes: byte-level vocabularies write tokens, which are bytes, as visible text. Radford et al. 2019."""

from functools import lru_cache


@lru_cache(maxsize=1)
def byte_letters() -> dict[int, str]:
    """A visible letter for each of the 256 bytes, so that tokens can be written in a text file.

    Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the letters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
