"""`import_named`: the modules with features that a command line, or one of its --config files, names.

    --import my_package.features            also several, and several times
    import: [my_package.features]           at the top of a YAML file

They are imported before the flags are read, since they may add some.
"""

from collections.abc import Iterator, Sequence

from ...errors import ConfigError
from ...features import FLAG, import_features
from .flags import CONFIG_FLAG, CommandLine, canonical, flags_with_words


def import_named(argv: Sequence[str]) -> None:
    """Import the modules that `argv` and its files name.

    Raises ConfigError if one cannot be imported. A file that cannot be read names none: reading it reports why.
    """
    import_features(_modules(argv))


def _modules(argv: Sequence[str]) -> Iterator[str]:
    for typed, words in flags_with_words(argv, CommandLine()):
        flag = canonical(typed)
        if flag == FLAG:
            if not words:
                raise ConfigError(f"{FLAG} needs the name of a module after it.")
            yield from words
        if flag == CONFIG_FLAG:
            from .config_files import imports_in

            for path in words:
                yield from imports_in(path)
