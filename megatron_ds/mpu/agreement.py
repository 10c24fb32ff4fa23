"""`require_agreement`: an error on all ranks when a value that must be equal differs between ranks.

facts = {"--lr": (0.001, "gpt.yaml:3"), "torch version": ("2.13.0", ""), …}   # (value, source) here
require_agreement(world, lambda: facts, "the ranks of this job differ", "Start all ranks with …")
"""

from collections.abc import Callable, Mapping
from typing import Any

from .group import Group

Facts = Mapping[str, tuple[Any, str]]
"""name → (value of types that JSON has, its source for the message or "")"""


def require_agreement(
    world: Group, read: Callable[[], Facts], problem: str, advice: str
) -> None:
    """Raise the same ConfigError on all ranks unless their facts are equal. Collective over `world`.

    read: returns the facts of this rank; not called where there is one rank. An error of it is raised on all
    ranks. The message begins with `problem`, names the first differences with both values, hosts and ranks,
    and ends with `advice`.
    """
    if world.size == 1:
        return
    from .compared_facts import compare

    compare(world, read, problem, advice)
