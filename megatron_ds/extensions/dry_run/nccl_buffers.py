"""Estimate of the device memory that NCCL takes for its buffers, outside of torch's allocator.

A rank receives from a peer through a channel by a buffer for each of NCCL's three protocols, and keeps it as long as
the communicator is there (`computeBuffSizes` of NCCL's src/init.cc; NVIDIA/nccl#864: memory is linear in channels and
peers). Peers follow from the operations that the plan counts for a group of n ranks:

    a ring          1             of each collective
    a tree          min(2, n-1)   of an all-reduce, in addition
    all-to-all      n-1
    messages        min(2, n-1)   of a ring of context-parallel ranks; of a pipeline in each of its lanes

Groups with the same ranks share a communicator, but for the gathers of ZeRO 3. The number of channels is NCCL's
choice by the links of the machine, which a plan does not know: CHANNELS is an assumption. No GPU has confirmed
the estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...config import RunConfig
from ...errors import ConfigError
from ...mpu.grid import AXES, Grid
from ...mpu.group import NUM_STREAMS
from ...planning.rank_plan import RankPlan

# Bytes of a buffer, by the variable that changes them: Simple; LL: 8 lines of 16 bytes, 512 threads, 8 steps;
# LL128: 120 elements of 8 bytes, 640 threads, 8 steps.
BUFFERS = {
    "NCCL_BUFFSIZE": 4 * 2**20,
    "NCCL_LL_BUFFSIZE": 8 * 16 * 512 * 8,
    "NCCL_LL128_BUFFSIZE": 120 * 8 * 640 * 8,
}
LIMITS = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
CHANNELS = 16  # of collectives, unless something limits them
CHANNELS_OF_A_PEER = 2  # of messages and all-to-alls
ALL_TO_ALL = {"all_to_all", "all_to_all_v"}
MESSAGES = {"send"}
GROUP_AXES = {*AXES, "etp", "edp"}


@dataclass
class Communicator:
    """A communicator of a rank. size: its ranks; channels: at most; operations: those that run on it"""

    size: int
    channels: int
    operations: set[str] = field(default_factory=set)
    lanes: int = 1

    @property
    def connections(self) -> int:
        """Peers times channels through which the rank receives."""
        others = self.size - 1
        peers = 0
        if self.operations & ALL_TO_ALL:
            peers += others
        if self.operations & MESSAGES:
            peers += self.lanes * min(2, others)
        rings = bool(self.operations - ALL_TO_ALL - MESSAGES)
        trees = min(2, others) if "all_reduce" in self.operations else 0
        of_peers = min(CHANNELS_OF_A_PEER, self.channels)
        return self.channels * (rings + trees) + of_peers * peers


def nccl_buffers(
    plan: RankPlan, config: RunConfig, grid: Grid, environ: Mapping[str, str]
) -> int:
    """Bytes of the buffers of a rank's communicators.

    Raises ConfigError for a variable of NCCL that is no number.
    """
    buffers = sum(_number(environ, *buffer) for buffer in BUFFERS.items())
    found = communicators(plan, config, grid, environ)
    return buffers * sum(one.connections for one in found)


def communicators(
    plan: RankPlan, config: RunConfig, grid: Grid, environ: Mapping[str, str]
) -> list[Communicator]:
    """Return those of a rank, by what it sends in a step."""
    most = min(CHANNELS, *(_number(environ, name, CHANNELS) for name in LIMITS))
    limits = {}
    for text in config.parallel.nccl_max_ctas:
        axes, _, number = text.partition("=")
        limits[_ranks(axes, grid, plan.rank)] = int(number)
    # Operations over groups with the same ranks share a communicator.
    made: dict[tuple[object, str], Communicator] = {}
    for operation, axes, size in plan.traffic.bytes:
        ranks = _ranks(axes, grid, plan.rank)
        apart = "gathers" if _is_apart(operation, axes, config) else ""
        one = made.setdefault(
            (ranks, apart), Communicator(size, min(most, limits.get(ranks, most)))
        )
        one.operations.add(operation)
        one.lanes = max(one.lanes, NUM_STREAMS.get(axes, 1))
    return [one for one in made.values() if one.size > 1]


def _ranks(axes: str, grid: Grid, rank: int) -> tuple[int, ...] | str:
    """Return the ranks of the group of a rank over these axes, or the name of a group that is cut in another way."""
    names = axes.split("-")
    if not GROUP_AXES.issuperset(names):
        return axes
    return grid.group_of(rank, *names)


def _is_apart(operation: str, axes: str, config: RunConfig) -> bool:
    """Return whether it is a gather of weights, for which ZeRO 3 has communicators of its own."""
    is_of_data = not {"tp", "etp", "pp"} & set(axes.split("-"))
    return config.zero.stage == 3 and operation == "all_gather" and is_of_data


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    try:
        number = int(text, 0) if text else default
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(
            f"{name}={text}: NCCL takes a number from 1 on. Correct the variable, or unset it for {default}."
        )
    return number
