"""`ForeignCheckpoints`: how a run starts from a checkpoint of another program.

The formats are those of compat/conversion. Without it, --load takes this package's checkpoints only.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..config.options.training import CheckpointConfig
from ..features import Provided
from ..progress.ramps import Progress
from .build import Replica

if TYPE_CHECKING:
    from ..checkpoint.pieces import Piece

FOREIGN_CHECKPOINTS: Provided[Any] = Provided("foreign checkpoints")


class ForeignCheckpoints:
    """The interface, and a package without formats: no folder is one of another program."""

    def format_of_folder(self, load: str | None, load_format: str | None) -> str | None:
        """Name of the format of the --load folder; None if it is this package's, or holds no checkpoint."""
        return None

    def defaults(
        self, argv: Sequence[str], *, with_dtype: bool = False
    ) -> dict[str, Any]:
        """Option name → value of the model and the tokenizer in the --load folder of these flags, and of the dtype
        of its weights."""
        return {}

    def log_length(self, config: RunConfig) -> None:
        """Log the length of sequences if it is that of the --load folder."""

    def read(self, config: RunConfig, name: str | None) -> Any:
        """Return the checkpoint in the --load folder, of the format `name`: headers and settings, tensors later."""
        return None

    def origin_of(self, run: Mapping, found: Any, config: RunConfig) -> dict[str, Any]:
        """Return an entry for run.json that an export reads: the format, family and settings of `found`."""
        return {}

    def load(
        self,
        replica: Replica,
        found: Any,
        pieces: "Sequence[Piece]",
        checkpoint: CheckpointConfig,
    ) -> Progress:
        """Fill weights and optimizer state from `found`, as the options `checkpoint` ask. Returns the progress.
        Collective over the world."""
        raise NotImplementedError


NONE = ForeignCheckpoints()


def foreign_checkpoints(*folders: str | None) -> ForeignCheckpoints:
    """Return the formats that are installed, for a run that reads these folders; None: it does not.

    A run that reads no folder loads no format.
    """
    if not any(folders):
        return NONE
    return FOREIGN_CHECKPOINTS.find() or NONE
