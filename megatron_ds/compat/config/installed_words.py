"""`WORDS`: the dialects of this package, for the readers of flags and files."""

from ...config.sources.foreign_words import ForeignWords
from .deepspeed_json import read_deepspeed
from .dialects import DIALECTS, FORK_NAMES, FORK_PHRASES, FORK_READERS
from .neox_yaml import read_yamls
from .unsupported import answer_to_flag


def _projects() -> dict[str, str]:
    """Return flag of a fork → its project. If two dialects have a flag, the first counts."""
    projects: dict[str, str] = {}
    for dialect in reversed(DIALECTS):
        projects |= dict.fromkeys(dialect.names, dialect.project)
    return projects


WORDS = ForeignWords(
    names=FORK_NAMES,
    projects=_projects(),
    phrases=FORK_PHRASES,
    readers=FORK_READERS,
    answer_to_flag=answer_to_flag,
    read_yamls=read_yamls,
    read_deepspeed=read_deepspeed,
)
