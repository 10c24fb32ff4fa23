"""Values in lists, tuples and dictionaries, as arguments and results of torch operations have them.

In place of torch.utils._pytree, which takes more time than the operations of tiny models.
"""

from collections.abc import Callable, Iterator
from typing import Any


def leaves(x: Any) -> Iterator[Any]:
    """The values, in order."""
    if isinstance(x, list | tuple | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from leaves(part)
    else:
        yield x


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """The same structure, with the function of each value."""
    if isinstance(x, list | tuple):
        return type(x)([mapped(function, part) for part in x])
    return (
        {k: mapped(function, part) for k, part in x.items()}
        if isinstance(x, dict)
        else function(x)
    )
