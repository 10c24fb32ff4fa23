"""Which checkpoint a restarted run has in its --save folder."""

from ..checkpoint.load import latest, read_run
from ..checkpoint.place import place_of
from ..checkpoint.save_folder import run_id_of, saved_run_in
from ..config.options.training import CheckpointConfig
from ..errors import CheckpointError


def own_step(checkpoint: CheckpointConfig, save: str, run_id: str) -> int | None:
    """Return the newest step of this run in the --save folder."""
    step = latest(save)
    if step is None:
        return None
    own: set[str | None] = {run_id}
    # A run that continues from --load in another folder keeps its identifier.
    if checkpoint.load and not checkpoint.finetune:
        own.add(_run_id(checkpoint.load))
    return step if _run_id(save) in own - {None, ""} else None


def has_begun(save: str, run_id: str) -> bool:
    """Return whether the --save folder holds files of this run."""
    there = saved_run_in(place_of(save))
    return there is not None and there.run_id == run_id


def _run_id(folder: str) -> str | None:
    """Return the identifier of the newest checkpoint; None where there is none of this package."""
    try:
        if not place_of(folder).is_dir():
            return None
        step = latest(folder)
        return None if step is None else run_id_of(read_run(folder, step))
    except CheckpointError:
        return None
