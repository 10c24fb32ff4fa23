"""Calls that torch.compile leaves as they are, between two of its graphs.

Import this module only inside compiled code: it imports torch._dynamo, which takes 2 to 3 s.
"""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call_outside_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, which calls functions of autograd whose backward cannot be part of a graph."""
    return function(*arguments)
