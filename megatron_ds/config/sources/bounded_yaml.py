"""A YAML text → plain values, in bounded memory.

References (`*name`) repeat a block without its characters, so ten lines can stand for 10^9 values; they are
counted wherever they stand.
"""

from typing import Any

import yaml

from ...errors import ConfigError

MOST_VALUES = 100_000  # values of a file, with those that references repeat
LARGEST_NUMBER = 4_096  # bits; Python writes no more than 4,300 digits as text
LONG_NUMBER = f"a number in it has more than {LARGEST_NUMBER:,} bits: this is not a configuration."
TOO_MANY = f"it has more than {MOST_VALUES:,} values: this is not a configuration."


class BoundedLoader(yaml.SafeLoader):
    """Constructs no Python objects, as SafeLoader, and merges (`<<: *name`) up to the bound."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Copy the merged entries into the mapping. Raises ConfigError."""
        count = len(node.value)
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                continue
            for inner in (
                value.value if isinstance(value, yaml.SequenceNode) else [value]
            ):
                if isinstance(inner, yaml.MappingNode):
                    # The second time, it has nothing to merge.
                    self.flatten_mapping(inner)
                    count += len(inner.value)
                if count > MOST_VALUES:
                    raise ConfigError(TOO_MANY)
        super().flatten_mapping(node)


def load_yaml(text: str) -> Any:
    """Return the values of a text. Raises ConfigError, also for what is not YAML, and RecursionError."""
    try:
        root = yaml.load(text, Loader=BoundedLoader)
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: a date such as 2024-99-99
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is not YAML: {' '.join(str(error).split())[:200]}."
        ) from None
    _check(root)
    return root


def _check(root: Any) -> None:
    """Raise ConfigError for too many values, or a number that Python does not write as text."""
    left = MOST_VALUES
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int) and value.bit_length() > LARGEST_NUMBER:
            raise ConfigError(LONG_NUMBER)
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if isinstance(inner, str | bytes) or not hasattr(inner, "__len__"):
            continue
        left -= len(inner)
        if left < 0:
            raise ConfigError(TOO_MANY)
        waiting += inner
