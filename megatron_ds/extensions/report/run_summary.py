"""`Summarized`: an observer that adds to metrics.jsonl what a run trains, in a few plain values for its readers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ...config import RunConfig
from ...config.options.data import DataConfig
from ...config.training_schedule import make_batch_size
from ...mpu.grid import AXES, Grid
from ...training.moments import RunStart
from ...training.observe.run_facts import RunFact
from ...training.observer import Observer
from ..dry_run.startup_text import count_parameters

MOCK = "mock tokens"


@dataclass(frozen=True)
class AboutRecord(RunFact):
    """What is trained, as `summary_of` has it. step: of the loaded checkpoint"""

    step: int
    about: Mapping[str, Any]

    kind = "about"


class Summarized(Observer):
    """Notes what is trained, at the start of each process."""

    def run_started(self, start: RunStart) -> None:
        """Note it. The parameters are counted on the one rank that writes."""
        grid = start.replica.mesh.grid
        if start.replica.mesh.rank == 0:
            about = summary_of(start.config, grid)
            start.note(AboutRecord(start.progress.step, about))


def summary_of(config: RunConfig, grid: Grid) -> dict[str, Any]:
    """Return values by name, which are in `metrics.jsonl` once for each process.

    parameters          of the whole model, without padding; trained: those that the optimizer changes
    experts             the most that a layer has; 0 for a dense model
    data                names of the corpora, without their folders
    batch               samples of a step, at the end of a ramp
    layout              axis → size, of the axes that divide something
    """
    model = config.model
    counts = count_parameters(config, grid)
    sizes = {axis: getattr(grid, axis) for axis in AXES}
    return {
        "model": model.model,
        "parameters": counts.all,
        "trained": counts.trained,
        "layers": model.num_layers,
        "width": model.hidden_size,
        "heads": model.num_attention_heads,
        "experts": max(model.experts, default=0),
        "vocabulary": model.vocab_size,
        "sequence": model.seq_length,
        "data": corpora_of(config.data),
        "batch": make_batch_size(config).final,
        "optimizer": config.optimizer.optimizer,
        "dtype": config.optimizer.params_dtype,
        "layout": {axis: size for axis, size in sizes.items() if size > 1},
        "zero": config.zero.stage,
    }


def corpora_of(data: DataConfig) -> list[str]:
    """Return the names of the corpora that a run trains on, without their folders."""
    if data.mock_data:
        return [MOCK]
    # Loaded where there are corpora.
    from ...data.loading.sources import read_sources

    sources = read_sources(data)
    paths = sources.parts[0] if sources.whole is None else sources.whole
    return [PurePath(word).name for word in paths.values if not _is_amount(word)]


def _is_amount(word: str) -> bool:
    """Return whether a word of a data path is a weight or a range of documents, and no prefix."""
    from ...data.loading.blend import RANGE

    if RANGE.fullmatch(word):
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True
