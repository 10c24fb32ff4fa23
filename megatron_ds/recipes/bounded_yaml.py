"""A YAML text → plain values, in bounded memory.

References (`*name`) repeat a block without its characters, so ten lines can stand for 10^9 values; they are
counted wherever they stand.
"""

from typing import Any

import yaml

from .shell_tokens import ShellError

MOST_VALUES = 100_000                    # values of a file, with those that references repeat
TOO_MANY = f"it has more than {MOST_VALUES:,} values: this is not a recipe."


class BoundedLoader(yaml.SafeLoader):
    """Constructs no Python objects, as SafeLoader, and merges (`<<: *name`) up to the bound."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Copy the merged entries into the mapping. Raises ShellError."""
        count = len(node.value)
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                continue
            for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(inner, yaml.MappingNode):
                    self.flatten_mapping(inner)              # the second time, it has nothing to merge
                    count += len(inner.value)
                if count > MOST_VALUES:
                    raise ShellError(TOO_MANY)
        super().flatten_mapping(node)


def load_yaml(text: str) -> Any:
    """The values of a text. Raises ShellError, also for what is not YAML."""
    try:
        root = yaml.load(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ValueError) as error:            # ValueError: a date such as 2024-99-99
        if isinstance(error, ShellError):
            raise
        raise ShellError(f"this is not YAML: {' '.join(str(error).split())[:200]}.") from None
    left, waiting = MOST_VALUES, [root]
    while waiting:
        value = waiting.pop()
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        if not isinstance(inner, str | bytes) and hasattr(inner, "__len__"):
            left -= len(inner)
            waiting += inner if left > 0 else []
        if left < 0:
            raise ShellError(TOO_MANY)
    return root
