"""Calls that torch.compile leaves as they are, between two of its graphs.

Import this module only inside compiled code: it imports torch._dynamo, which takes 2 to 3 s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function


@torch.compiler.disable
def apply_outside_graphs(function: type[Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`. A backward that writes gradients to buffers cannot be part of a graph."""
    return function.apply(*arguments)


@torch.compiler.disable
def call_outside_graphs(function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, with an autograd function whose backward runs others."""
    return function(*arguments)
