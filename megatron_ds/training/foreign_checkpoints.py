"""`ForeignCheckpoints`: how a run starts from a checkpoint of another program.

The formats are those of compat/conversion. Without it, --load takes this package's checkpoints only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.pieces import Piece
from ..config import RunConfig
from ..plugins import plugged
from ..progress.ramps import Progress
from .build import Replica


class ForeignCheckpoints:
    """The interface, and a package without formats: no folder is one of another program."""

    def format_of_folder(self, load: str | None, load_format: str | None) -> str | None:
        """Name of the format of the --load folder; None if it is this package's, or holds no checkpoint."""
        return None

    def defaults(self, argv: Sequence[str]) -> dict[str, Any]:
        """Option name → value of the model and the tokenizer in the --load folder of these flags."""
        return {}

    def log_length(self, config: RunConfig) -> None:
        """Log the length of sequences if it is that of the --load folder."""

    def read(self, config: RunConfig, name: str | None) -> Any:
        """The checkpoint in the --load folder, of the format `name`: headers and settings, tensors later."""
        return None

    def origin_of(self, run: Mapping, found: Any, config: RunConfig) -> dict[str, Any]:
        """An entry for run.json that an export reads: the format, family and settings of `found`."""
        return {}

    def load(self, engine: Replica, found: Any, pieces: Sequence[Piece]) -> Progress:
        """Fill weights and optimizer state from `found`. Returns the progress. Collective over the world."""
        raise NotImplementedError


NONE = ForeignCheckpoints()


def foreign_checkpoints() -> ForeignCheckpoints:
    """The formats that are installed."""
    return plugged("foreign checkpoints") or NONE
