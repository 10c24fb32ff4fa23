"""The fastest layouts of a model on a number of devices.

records    of the layers, for each way to divide and compute them (layer_record.py); kept on disk
estimates  of all layouts; those that need more than the memory are left out (estimate.py)
plans      of the layouts with the best estimates, whole, with their seconds (step_time.py): these are shown
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import TypeGuard

from ...config import RunConfig
from ...errors import MegatronDSError
from ...mpu.fake_group import fake_mesh
from ...planning.run_model import describe_layers
from ..dry_run.world_plan import plan_world
from .cluster import Cluster
from .estimate import LayoutEstimate, estimate, seconds_of_sorts
from .layer_record import LayerRecord, RecordCache, key_of, record_layers
from .layouts import SOURCE, RunLayout, is_accepted, layouts, with_layout
from .recorded_work import WorkRecorder
from .step_time import in_run, step_time

MARGIN = 1.03  # of the memory, up to which an estimate is worth a plan
FURTHER = 3  # plans beyond those that are shown, as estimates are not exact


@dataclass(frozen=True)
class Tried:
    """A layout and its estimate."""

    layout: RunLayout
    config: RunConfig
    estimate: LayoutEstimate


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that was planned whole. peak: bytes of the rank that needs the most"""

    layout: RunLayout
    seconds: float
    peak: float
    fits: bool
    mfu: float


Progress = Callable[[str, Iterable, int], Iterable]
"""(what is done, items, their number) → the items, shown as they are taken"""


def silent(what: str, items: Iterable, total: int) -> Iterable:
    """Show nothing."""
    return items


@dataclass
class Search:
    """A search for a model and its settings. device: planned, "cpu" or "cuda"."""

    config: RunConfig
    ranks: int
    cluster: Cluster
    device: str = "cuda"
    cache: RecordCache | None = None
    progress: Progress = silent

    def tried(self) -> list[Tried]:
        """Return all layouts with their estimates, the fastest first. The rules may refuse some of them."""
        wanted = list(
            layouts(self.config, self.ranks, int(self.cluster.devices_per_host))
        )
        by_record: dict[tuple, list[RunLayout]] = {}
        for layout in wanted:
            by_record.setdefault(layout.record, []).append(layout)
        found: list[Tried] = []
        groups = self.progress("layers", by_record.values(), len(by_record))
        for group in groups:
            found += self._tried_of(group)
        return sorted(found, key=lambda tried: tried.estimate.seconds)

    def _tried_of(self, group: Sequence[RunLayout]) -> list[Tried]:
        """Return the estimates of layouts whose layers have the same records."""
        records = self._records(group[0])
        if records is None:
            return []
        first = with_layout(self.config, group[0], self.ranks)
        cluster = in_run(self.cluster, first, self.device)
        seconds = seconds_of_sorts(records, cluster, first)
        # Neither pipelines nor ZeRO change the layers.
        layers = describe_layers(first, fake_mesh(first.grid(), 0))
        found = []
        for layout in group:
            config = with_layout(self.config, layout, self.ranks)
            try:
                estimated = estimate(config, layers, records, seconds, self.cluster)
            except MegatronDSError:  # a cut that has no layers for some stage
                continue
            found.append(Tried(layout, config, estimated))
        return found

    def _records(self, layout: RunLayout) -> dict[str, LayerRecord] | None:
        """Return the records of a layout, from the cache if it has them; None if its layers are refused."""
        data = layout.ep // gcd(layout.ep, layout.cp * layout.tp // layout.etp)
        alone = replace(layout, pp=1, chunks=1, zero=0)
        batch = {"train.global_batch_size": data * layout.micro_batch}
        config = with_layout(
            self.config.with_values(batch, SOURCE),
            alone,
            layout.tp * layout.cp * data,
        )
        key = key_of(config, self.device)
        records = self.cache.find(key) if self.cache else None
        if records is None:
            if not is_accepted(config):
                return None
            records = record_layers(config, self.device)
            if self.cache:
                self.cache.keep(key, records)
        return records

    def may_fit(self, one: Tried) -> bool:
        """Return whether an estimate is small enough for a plan."""
        return one.estimate.peak <= MARGIN * self.cluster.device.memory

    def best(self, tried: Sequence[Tried], top: int) -> list[PlannedLayout]:
        """Plan the layouts with the best estimates whole; the fastest that fit first, at most `top`."""
        small = filter(self.may_fit, tried)
        accepted = (one for one in small if is_accepted(one.config))
        # Estimates leave out some memory: the search ends when enough plans fit.
        fitting: list[PlannedLayout] = []
        for one in self.progress("plans", accepted, top + FURTHER):
            found = self._planned(one)
            if found.fits:
                fitting.append(found)
            if len(fitting) == top + FURTHER:
                break
        return sorted(fitting, key=lambda found: found.seconds)[:top]

    def _planned(self, one: Tried) -> PlannedLayout:
        key = key_of(one.config, self.device, asdict(self.cluster))
        known = self.cache.read(key) if self.cache else None
        seconds, peak, mfu = known if _is_plan(known) else self._numbers(one, key)
        fits = peak <= self.cluster.device.memory
        return PlannedLayout(one.layout, seconds, peak, fits, mfu)

    def _numbers(self, one: Tried, key: str) -> list[float]:
        """Plan a layout; return its seconds, bytes and MFU, which the cache then has."""
        plan = plan_world(one.config, 0, self.device, WorkRecorder)
        time = step_time(plan, self.cluster)
        found = [time.seconds, plan.worst.peak, time.mfu]
        if self.cache:
            self.cache.write(key, found)
        return found


def _is_plan(values: object) -> TypeGuard[list[float]]:
    """Return whether values of a file are three numbers: seconds, bytes and the MFU of a plan."""
    if not isinstance(values, list):
        return False
    return [type(value) for value in values] == [float, int, float]
