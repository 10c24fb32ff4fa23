"""How often the units of ZeRO 3 are gathered in a step: `LayerGathering` runs on units that only count. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from .gathering import GatherUnit, LayerGathering
from .traffic import KEEP, RELEASE


@dataclass
class Meter:
    """Elements that are whole: now, and the maximum so far."""

    now: int = 0
    most: int = 0


class CountedUnit(GatherUnit):
    """A `GatherUnit` without memory that counts how often it is gathered."""

    def __init__(self, numel: int, whole: Meter | None = None):
        super().__init__(numel, is_free=True)
        self.gathers = 0
        self._whole = whole or Meter()

    def start(self) -> None:
        if self.is_free:
            self.is_free = False
            self.gathers += 1
            self._whole.now += self.numel
            self._whole.most = max(self._whole.most, self._whole.now)

    def free(self) -> None:
        if not self.is_free:
            self.is_free = True
            self._whole.now -= self.numel


def count_gathers(
    gatherings: Mapping[int, LayerGathering], moments: Iterable[tuple[str, int]]
) -> tuple[dict[GatherUnit, int], int]:
    """(how often each unit is gathered in a step, the most elements that are whole at a time).

    gatherings: by stage. moments: (KEEP, "forward", "backward" or RELEASE; stage) in the program's order.
    """
    whole = Meter()
    units = chain.from_iterable(gathering.units for gathering in gatherings.values())
    counted = {unit: CountedUnit(unit.numel, whole) for unit in units}
    of = lambda lists: [[counted[unit] for unit in units] for units in lists]
    plans = {
        stage: LayerGathering(of(g.needs), of(g.in_backward), g.prefetch, stage=stage)
        for stage, g in gatherings.items()
    }
    for moment, stage in moments:
        if (gathering := plans.get(stage)) is None:
            continue
        if moment in (KEEP, RELEASE):
            getattr(gathering, moment)()
            continue
        order = range(len(gathering.needs))
        for layer in order if moment == "forward" else reversed(order):
            gathering.enter(layer, moment == "backward")
            gathering.leave(layer, moment == "backward")
    return {unit: count.gathers for unit, count in counted.items()}, whole.most
