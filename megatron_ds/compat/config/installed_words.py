"""`WORDS`: the dialects of this package, for the readers of flags and files."""

from functools import partial

from ...config.sources.foreign_words import ForeignWords
from ...features import Later
from .dialects import DIALECTS, FORK_NAMES, FORK_READERS
from .megatron_readers import MEGATRON_READERS

own = partial(Later, __package__)


def _projects() -> dict[str, str]:
    """Return the mapping flag of a fork → its project. If two dialects have a flag, the first counts."""
    projects: dict[str, str] = {}
    for dialect in reversed(DIALECTS):
        projects |= dict.fromkeys(dialect.names, dialect.project)
    return projects


WORDS = ForeignWords(
    names=FORK_NAMES,
    projects=_projects(),
    readers={**FORK_READERS, **MEGATRON_READERS},
    answer_to_flag=own(".unsupported:answer_to_flag"),
    read_yamls=own(".neox_yaml:read_yamls"),
    read_deepspeed=own(".deepspeed_json:read_deepspeed"),
)
