"""`install_as_deepspeed`: this package under the name `deepspeed`, for libraries that import it by that name
(accelerate, and with it the Trainer of transformers).

They ask three things: whether there is such a module, its metadata (an installed distribution `deepspeed` of
at least some version), and its names. The version is that of the DeepSpeed whose names and defaults these
are.
"""

import importlib.machinery
import sys
from collections.abc import Iterable
from functools import wraps
from importlib.metadata import PathDistribution
from types import ModuleType
from typing import Any

from ...errors import ConfigError
from .. import engine
from .modules import FOREIGN, PACKAGE, DeepSpeedFinder, names_of
from .program_environment import FOLDER

VERSION = "0.19.8"
# The metadata of an installed distribution, which has no files.
DISTRIBUTION = PathDistribution(FOLDER / f"{FOREIGN}-{VERSION}.dist-info")


class InstalledModule(ModuleType):
    """The module `deepspeed`: names of `megatron_ds`, and DeepSpeed's version."""

    __version__ = version = VERSION
    __git_hash__ = __git_branch__ = None
    __version_major__, __version_minor__, __version_patch__ = map(
        int, VERSION.split(".")
    )

    def __getattr__(self, name: str) -> Any:
        if name == "initialize":
            return initialize
        if name.startswith("__"):
            raise AttributeError(f"module {FOREIGN!r} has no attribute {name!r}")
        return getattr(sys.modules[PACKAGE], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(sys.modules[PACKAGE]), *names_of("")})


@wraps(engine.initialize)
def initialize(*args: Any, **options: Any) -> Any:
    """`megatron_ds.initialize`; checkpoints without a tag get DeepSpeed's, "global_step10", and a folder.

    Libraries look for such folders before they load a checkpoint.
    """
    made = engine.initialize(*args, **options)
    save = made.engine.save_checkpoint

    @wraps(save)
    def save_checkpoint(
        save_dir: Any, tag: str | None = None, *others: Any, **named: Any
    ) -> Any:
        default = f"global_step{made.engine.global_steps}"
        return save(save_dir, default if tag is None else tag, *others, **named)

    vars(made.engine)["save_checkpoint"] = save_checkpoint
    return made


class _Installed(DeepSpeedFinder):
    """The finder of `deepspeed`'s modules and distribution."""

    @staticmethod
    def find_distributions(context: Any = None) -> Iterable[PathDistribution]:
        name = getattr(context, "name", None)
        return [DISTRIBUTION] if name in (None, FOREIGN) else []


def install() -> None:
    """Make `import deepspeed` import this package. Raises ConfigError if DeepSpeed is imported already."""
    present = sys.modules.get(FOREIGN)
    if isinstance(present, InstalledModule):
        return
    if present is not None:
        place = getattr(present, "__file__", "another place")
        raise ConfigError(
            f"install_as_deepspeed(): {FOREIGN} has been imported already, from {place}, so "
            "libraries keep using it. Call install_as_deepspeed() first in the program, before "
            f"{FOREIGN} and the libraries that use it are imported."
        )
    sys.meta_path.insert(0, _Installed)
    module = InstalledModule(FOREIGN, sys.modules[PACKAGE].__doc__)
    spec = importlib.machinery.ModuleSpec(
        FOREIGN, None, origin=sys.modules[PACKAGE].__file__, is_package=True
    )
    module.__spec__ = spec
    module.__path__ = []
    module.__package__ = FOREIGN
    module.__file__ = sys.modules[PACKAGE].__file__
    sys.modules[FOREIGN] = module
