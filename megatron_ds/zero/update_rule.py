"""`UpdateRule`: what an optimizer declares about the exchange of its ranks, before anything is built.

An entry of the registry of optimizers may declare `rule_of`, a function from its section of the configuration to
a rule. `ZeroSettings`, the planner and `ZeroOptimizer` ask the rule; they know no optimizer
by name. `UpdateRule` itself is the rule of an optimizer that reads the sum of the gradients in every step.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..mpu.group import Group
from .data_groups import DataGroups, Hierarchy
from .exchange import FullPrecisionExchange, Sent
from .layout import Layout
from .update_hook import UpdateHook

if TYPE_CHECKING:
    from .parameter_norms import ParameterNorms


class UpdateRule:
    """A derived class is a frozen dataclass: the groups of parameters of a run must have equal rules.

    exchange        the class of the exchange that sums gradients in full precision
    keeps_gradients  some steps leave each rank its own gradient, whole; the exchange then has `is_off`
    keeps_masters   fp32 weights have masters, because weights of ranks differ in some steps
    """

    exchange: type[FullPrecisionExchange] = FullPrecisionExchange
    keeps_gradients: bool = False
    keeps_masters: bool = False

    def check(self, *, gradients_are_split: bool, state_is_split: bool) -> None:
        """Raises ConfigError if ZeRO splits what an update needs whole. Offloading splits gradients, too."""

    def messages(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        ranks: Hierarchy,
        groups: DataGroups,
    ) -> Iterator[Sent]:
        """Return what a step sends for a set of parameters, besides what `exchange` sends for their gradients.

        parameters: in the order of the layout. Groups of one rank may be included.
        """
        return iter(())

    def norm_messages(self, norms: "ParameterNorms") -> Iterator[tuple[Group, int]]:
        """(group, bytes) of the all-reduces of a step over `norms`, besides those of norms themselves."""
        return iter(())

    def state_bytes(self, layout: Layout, shard: int | None) -> int:
        """Bytes that a rank keeps for a set, besides the state of its leaves. shard: None if it has all."""
        return 0

    def make_hook(self, **parts: Any) -> UpdateHook:
        """Return the hook of a `ZeroOptimizer`. parts: its `sets` that are trained, `groups`, `resident` optimizer,
        `exchange` and `device`."""
        return UpdateHook()


SUMMED = UpdateRule()  # of optimizers that declare none
