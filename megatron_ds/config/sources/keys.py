"""Keys of options in files."""

from collections.abc import Mapping

from ...errors import ConfigError
from ...features import per_features
from ..options.option import Option
from ..run import all_options


@per_features
def names() -> Mapping[str, Option]:
    """Key → option. Keys are the field's name, and its flags that take a value, with underscores."""
    table: dict[str, Option] = {}
    for option in all_options().values():
        if option.name in table:
            raise ConfigError(
                f"{table[option.name].path} and {option.path} have the same name. Rename the option of the feature."
            )
        table[option.name] = option
    for option in all_options().values():
        for flag in (option.flag, *option.flags):
            table.setdefault(flag[2:].replace("-", "_"), option)
    return table
