"""The gathering of the sets of a pipeline stage."""

from collections.abc import Sequence

from .gathering import LayerGathering, gathering_over, units_by_parameter
from .parameter_set import ParameterSet
from .set_plan import SHARED, ParameterUse


def make_gathering(
    use: ParameterUse, stage: int, sets: Sequence[ParameterSet], prefetch: int | None
) -> LayerGathering:
    """Return the gathering of a stage, which also reduces gradients when a layer is left in backward."""
    gathered = [s for s in sets if s.plan.units and s.plan.stage in (stage, SHARED)]
    units = units_by_parameter((s.plan, s.parameters, s.store.units) for s in gathered)
    reduced = [s for s in gathered if s.plan.stage == stage and s.buckets is not None]

    def close(layer: int) -> None:
        for s in reduced:
            for unit in s.store.units:
                if unit.layer == layer:
                    s.gradients.close(unit.last_bucket)

    return gathering_over(use, stage, units, prefetch, close)
