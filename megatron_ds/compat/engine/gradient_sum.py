"""The JSON's "gradient_allreduce_op": whether an engine averages the gradients of data-parallel ranks or adds
them up.
"""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

KEY = "gradient_allreduce_op"


def sums_gradients(name: str, block: Mapping[str, Any]) -> bool:
    """Return whether gradients are summed over the ranks. Raises ConfigError for a value that is no operation.

    name: of the config, for messages
    """
    value = block.get(KEY) or "mean"
    operation = value.lower() if isinstance(value, str) else value
    if operation not in ("mean", "sum", "auto"):
        raise ConfigError(
            f'{name}: "{KEY}" is {value!r}: gradients of data-parallel ranks are averaged or '
            "added up. Use mean or sum."
        )
    return operation == "sum"
