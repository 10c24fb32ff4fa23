"""Arithmetic of a shell script, as the tree of a Python expression of which only numbers are computed.

12 * (3 + 1)        48
a + 1               ValueError: names are replaced by their values before
10 ** 1000          ValueError: results of more than 30 digits are refused, so that none fills the memory
"""

import ast
import operator
from collections.abc import Callable, Mapping

LARGEST = 10**30

BINARY: Mapping[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


# What the parser and `_number` raise for an expression without a value.
NOT_COMPUTED = (
    SyntaxError,
    ValueError,
    ZeroDivisionError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def computed(text: str) -> int:
    """Return the value of an expression. Raises one of NOT_COMPUTED."""
    tree = ast.parse(text, mode="eval")
    return int(_number(tree.body))


def _number(node: ast.AST) -> int:
    """Return the value of a tree of numbers and operators. Raises ValueError for anything else."""
    # Powers are limited before they are computed, since their numbers grow fastest.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = _number(node.left)
        power = _number(node.right)
        if not 0 <= power <= 64 or abs(base) > 2**16:
            raise ValueError("too large")
        value = base**power
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        function = BINARY[type(node.op)]
        value = function(_number(node.left), _number(node.right))
    elif isinstance(node, ast.Compare) and _is_single(node):
        function = BINARY[type(node.ops[0])]
        value = function(_number(node.left), _number(node.comparators[0]))
    # Signs, choices, "and" and "or".
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_number(node.operand)
    elif isinstance(node, ast.IfExp):
        chosen = node.body if _number(node.test) else node.orelse
        value = _number(chosen)
    elif isinstance(node, ast.BoolOp):
        values = [bool(_number(value)) for value in node.values]
        value = all(values) if isinstance(node.op, ast.And) else any(values)
    else:
        raise ValueError("not arithmetic")
    # Every intermediate value is limited.
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value


def _is_single(node: ast.Compare) -> bool:
    """Return whether it is one comparison by an operator of `BINARY`."""
    return len(node.ops) == 1 and type(node.ops[0]) in BINARY
