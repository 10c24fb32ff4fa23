"""Options that choose layers, as Megatron writes them: a number, or a list expression."""

import re

from ...errors import ConfigError

MOST_LAYERS = 10_000
MOST_BRACKETS = 20


def read_layer_pattern(text: str, flag: str) -> int | list[int]:
    """ "2" → 2;  "([0]*1+[1]*3)*2" → [0, 1, 1, 1, 0, 1, 1, 1]. Parsed, not evaluated. Raises ConfigError, with
    the flag."""
    bare = re.sub(r"\s", "", text)
    if re.fullmatch(r"\(*[1-9]\d*\)*", bare):
        return int(bare.strip("()"))
    wrong = ConfigError(
        f"{flag} {text!r} is neither a number from 1 up nor a list of 0 and 1. Examples: 2, "
        "[0,1,1,1], ([0]*1+[1]*23)."
    )
    tokens = re.findall(r"\[[01](?:,[01])*\]|\*\d{1,5}|[+()]", bare)
    if "".join(tokens) != bare or tokens.count("(") > MOST_BRACKETS:
        raise wrong
    rest = tokens[::-1]
    try:
        values = _sum(rest)
        if rest or not values:
            raise wrong
        return values
    except IndexError:  # of `rest`
        raise wrong from None
    except OverflowError:
        raise ConfigError(
            f"{flag} {text!r} describes more than {MOST_LAYERS} layers. Use one entry for each "
            "layer of the model."
        ) from None


def _sum(rest: list[str]) -> list[int]:
    """Terms, from the end of the list on, joined by "+"."""
    values = _term(rest)
    while rest and rest[-1] == "+":
        rest.pop()
        values = values + _term(rest)
    return values


def _term(rest: list[str]) -> list[int]:
    """Return a list or a sum in brackets, perhaps repeated. Raises IndexError, or OverflowError for too many."""
    token = rest.pop()
    if token == "(":
        values = _sum(rest)
        if rest.pop() != ")":
            raise IndexError
    elif token.startswith("["):
        values = [int(value) for value in token[1:-1].split(",")]
    else:
        raise IndexError
    while rest and rest[-1].startswith("*"):
        times = int(rest.pop()[1:])
        if len(values) * times > MOST_LAYERS:
            raise OverflowError
        values = values * times
    return values
