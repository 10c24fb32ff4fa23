"""Features outside the core that the core asks for by name, and does without where they are not installed.

    compat/        dialects of other programs: their flags, files and checkpoints
    extensions/    optimizers and data features that hang on the core's interfaces

The core imports neither. `plugged` loads the object of a row of `PLUGINS` when it is first needed.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# name → "module below megatron_ds:object in it"
PLUGINS = {
    "foreign names": "compat.deepspeed.deepspeed_modules:find",
    "foreign modules": "compat.deepspeed.deepspeed_modules:Finder",
    "moved modules": "compat.moved_modules:MovedFinder",
    "foreign words": "compat.config.installed_words:WORDS",
    "foreign checkpoints": "compat.conversion.foreign_start:CHECKPOINTS",
}


def plugged(name: str) -> Any | None:
    """The object of a plugin; None if its package is not installed."""
    module, _, attribute = PLUGINS[name].partition(":")
    wing = f"{__package__}.{module.partition('.')[0]}"
    if find_spec(wing) is None:
        return None
    return getattr(import_module(f"{__package__}.{module}"), attribute)
