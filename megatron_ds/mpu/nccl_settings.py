"""`NcclSettings`: how NCCL runs the kernels of each group.

A kernel of NCCL occupies multiprocessors of the GPU until its message has passed. On a stream of high priority
it takes the first ones that a product of matrices leaves, and the other ranks do not wait for the rest of the
product. A receive of a pipeline, which waits for most of a computation, should occupy few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from .grid import Grid

Lists = tuple[tuple[int, ...], ...]  # the groups of all ranks over some axes


@dataclass(frozen=True)
class NcclSettings:
    """The settings of the groups of a run. Groups over different axes may be the same: they are known by their
    ranks.

    high_priority  the groups whose streams have a high priority; None: all
    max_ctas       groups → thread blocks that a kernel may have at most
    """

    high_priority: frozenset[Lists] | None = None
    max_ctas: Mapping[Lists, int] = field(default_factory=dict)

    @classmethod
    def over(
        cls, grid: Grid, high_priority: Sequence[str], max_ctas: Sequence[str]
    ) -> "NcclSettings":
        """Return the settings of the options of the same names, with axes joined by "-"."""
        of = lambda name: tuple(grid.groups(*name.split("-")))
        limits = (text.split("=") for text in max_ctas)
        high = None
        if high_priority != ("all",):
            high = frozenset(of(name) for name in high_priority if name != "none")
        return cls(high, {of(name): int(number) for name, number in limits})

    def options(
        self, groups: Sequence[tuple[int, ...]], timeout: timedelta | None
    ) -> Any:
        """torch's options of a group among these."""
        from torch.distributed import ProcessGroupNCCL

        lists = tuple(groups)
        is_high = self.high_priority is None or lists in self.high_priority
        options = ProcessGroupNCCL.Options(is_high_priority_stream=is_high)
        if timeout is not None:
            options._timeout = timeout
        if lists in self.max_ctas:
            options.config.max_ctas = self.max_ctas[lists]
        return options


USUAL = NcclSettings()
