"""The axes of the layout grid: a file for each part of a run, a row for each option."""

from tests.grid.axes import (
    experts,
    models,
    optimizers,
    pipelines,
    ranks,
    samples,
    state,
)

AXES = (
    *ranks.AXES,
    *pipelines.AXES,
    *state.AXES,
    *models.AXES,
    *samples.AXES,
    *experts.AXES,
    *optimizers.AXES,
)
