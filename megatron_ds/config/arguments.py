"""`Arguments`: the few flags of a tool, with errors like those of the training scripts.

Plain argparse prints a page of usage, accepts abbreviated flags, and reports a misspelt required flag only as missing.
"""

import argparse
import sys
from collections.abc import Sequence

from ..errors import ConfigError
from ..registry import did_you_mean


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser whose `parse_args` raises one ConfigError. Call it inside `main_guard`."""

    def __init__(self, description: str | None):
        super().__init__(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        args = sys.argv[1:] if args is None else list(args)
        known = list(self._option_string_actions)
        typed = [word.partition("=")[0] for word in args if word.startswith("--") and len(word) > 2]
        wrong = [f"unknown flag {flag}{did_you_mean(flag, known) or '.'}" for flag in typed if flag not in known]
        if wrong:
            raise ConfigError(f"{' '.join(wrong)} --help lists the flags.")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> None:
        raise ConfigError(f"{message.removeprefix('argument ')}. --help lists the flags.")
