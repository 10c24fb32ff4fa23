"""`NoSaves`: the checkpoints of a run without --save."""

from collections.abc import Callable, Mapping

from ..errors import ConfigError
from ..progress.ramps import Progress
from .build import Replica


class NoSaves:
    """Saves of one run: of one without --save there are none.

    step       of the newest complete checkpoint of this process, or of the one that it loaded; -1 without one
    tried      the last step at which a save was asked for
    check      called before a save; an error that it raises on all ranks prevents the save
    report     called for each complete checkpoint: its step, and the seconds that steps waited for it
    """

    def __init__(self, replica: Replica, description: dict, loaded_step: int | None):
        check_states(replica, description)
        self.step = -1 if loaded_step is None else loaded_step
        self.tried = -1
        self.check: Callable[[], None] = lambda: None
        self.report: Callable[[int, float], None] = lambda step, seconds: None

    def save(self, progress: Progress, is_last: bool = False) -> None:
        """Save this moment, in the background if --async-save is given and training goes on. Collective."""

    def before_training(self, progress: Progress) -> None:
        """Save the start of a run, if --extra-save-iters has 0. Collective over the world."""

    def is_due(self, step: int) -> bool:
        """Return whether a save follows this step. Collective over the world if --trigger-path is given."""
        return False

    def at_end(self, progress: Progress) -> None:
        """Wait for the save under way, and save the last step unless that has been done or tried. Collective."""

    def after_step(self, ready: int) -> None:
        """Go on with the save under way when all ranks are ready. ready: the ranks that are. Collective."""

    def finish(self) -> None:
        """Wait for the save under way, if any, until its end. Collective over the world.

        Raises CheckpointError on all ranks when any rank failed.
        """


def check_states(replica: Replica, description: Mapping) -> None:
    """Raises ConfigError where an observer keeps state under a name that run.json has for something else."""
    own = {*description, "progress", "optimizer"}
    for name in sorted(own & replica.states.keys()):
        raise ConfigError(
            f"an observer keeps its state under {name!r}, which run.json has for something else. Use another name in "
            "`replica.states`."
        )
