"""An axis of the layout grid: what a feature contributes to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.harness.covering import Case, Rule
from tests.harness.layout_runs import GLOBAL_BATCH, STEPS, Run
from tests.harness.moe_runs import ExpertsSeen

# Keys of a layout (layout_comparison.py), and flags of the job, which begin with "--".
Options = Mapping[str, object]
TWO_CHUNKS = ("interleaved", "zb-v")


@dataclass(frozen=True)
class Shown:
    """A case's run under its layout, and what its experts showed."""

    case: Case
    job: list[str]
    layout: str
    run: Run
    experts: ExpertsSeen

    def seen(self, name: str) -> set:
        """The members of a set that each rank has, of all ranks."""
        return set.union(*(getattr(seen, name) for seen in self.run.seen))

    def operations(self, axis: str) -> set[str]:
        """Operations between ranks along an axis, and others."""
        return {
            operation
            for seen in self.run.seen
            for operation, axes, _ in seen.traffic.calls
            if axis in axes.split("-")
        }


@dataclass(frozen=True)
class Axis:
    """An option of a run with the values that the grid gives it.

    values: what a value adds to a run, or a function of the case that gives it. The first is the plain one.
    needs: rules about its values and those of other axes, as covering.py takes them.
    shows: asserts that its value is in force, from what the ranks showed.
    """

    name: str
    values: Mapping[object, Options | Callable[[Case], Options]]
    needs: tuple[Rule, ...] = ()
    shows: Callable[[Shown], None] = lambda shown: None

    def options(self, case: Case) -> Options:
        """What the case's value adds to its run."""
        value = self.values[case[self.name]]
        return value(case) if callable(value) else value


def layout_axis(name: str, *values, needs=(), shows=lambda shown: None) -> Axis:
    """An axis that is a key of the layout."""
    return Axis(name, {value: {name: value} for value in values}, needs, shows)


def ranks(case: Case) -> int:
    """The number of ranks of a case."""
    return case["tp"] * case["cp"] * case["pp"] * case["dp"]


def chunks(case: Case) -> int:
    """The stages on each pipeline rank."""
    return 2 if case["schedule"] in TWO_CHUNKS else 1


def layers(case: Case) -> int:
    """The layers of the model. Each stage takes one, and those that drop tokens are between two others."""
    needs_three = case["pp"] > 1 or case["ltd"]
    return max(3 if needs_three else 2, case["pp"] * chunks(case))


def micro_batches(case: Case) -> int:
    """The micro-batches of a data-parallel rank, in all steps."""
    return STEPS * GLOBAL_BATCH // case["dp"] // case["mbs"]
