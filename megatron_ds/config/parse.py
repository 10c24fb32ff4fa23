"""`parse`: the way in. Command line → files → merge → rules → `RunConfig`."""

from collections.abc import Container, Mapping, Sequence

from .flags import read_flags
from .merge import merge
from .run import RunConfig


def parse(argv: Sequence[str], world_size: int = 1, env: Mapping[str, str] | None = None,
          known: Mapping[str, Container[str]] | None = None) -> RunConfig:
    """The configuration said by `argv`, for `world_size` ranks.

    known: path → names that the option may have, for options that name an entry of a registry (which lie in layers above):
    {"parallel.pipeline_schedule": SCHEDULES}. Raises ConfigError with everything that is wrong; `--help` prints and exits.
    """
    line = read_flags(argv)
    return merge([], line.settings, world_size)
