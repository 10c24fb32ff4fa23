"""`Prepare`: what the objective of a wing does between the loading of a run and its first step."""

from typing import Any, Protocol

from ..config import RunConfig
from ..data.tokenizers import Tokenizer
from ..progress.ramps import Progress
from .build import Replica
from .loaders import Loaders
from .start import Start


class Prepare(Protocol):
    """A function of an objective."""

    def __call__(
        self,
        replica: Replica,
        loaders: Loaders,
        start: Start,
        description: dict,
        progress: Progress,
    ) -> dict[str, Any]:
        """Return what run.json has to remember. The weights of the run are loaded. Collective over the world."""


def open_objective(config: RunConfig, tokenizer: Tokenizer) -> Prepare:
    """Return the preparation of the run's objective. Not collective; raises what its files are refused with."""
    objective = config.objective
    if objective is None or objective.start is None:
        return lambda *loaded: {}
    return objective.start(config, tokenizer)
