"""Process groups of torch.distributed, and the transports over them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CommunicationError
from ..host import places
from ..host.backend_log import only_errors
from .control import control_group
from .group import ACTIVATION_AXES, NUM_STREAMS, Transport
from .nccl_settings import USUAL, NcclSettings
from .stuck_ranks import current_call, name_stuck_ranks

if TYPE_CHECKING:
    from .transport import TorchTransport


def connect_torch(
    axes: str,
    groups: list[tuple[int, ...]],
    rank: int,
    timeout: timedelta | None = None,
    nccl: NcclSettings = USUAL,
) -> Transport | None:
    """Make the process groups of `groups`; return the transport of the one with `rank`, None if it is alone
    there. timeout: of their collectives; None: that of the whole world. nccl: of groups of GPUs.

    Collective over the whole world, not only over members: torch names groups by counting them, so all ranks
    must make the same groups. Raises CommunicationError where others do not make them in time.
    """
    from .gloo import GlooTransport

    timeout = timeout or world_timeout()
    mine: TorchTransport | None = None
    options = nccl.options(groups, timeout) if _has_nccl() else None
    control = control_group(timeout) if _has_nccl() else None
    num_lanes = NUM_STREAMS.get(axes, 0) if _has_nccl() else 0
    for ranks in groups:
        if len(ranks) > 1:
            made = [
                _new_group(list(ranks), timeout, axes, options)
                for _ in range(1 + num_lanes)
            ]
            if rank in ranks:
                mine = transport_over(made[0], axes, made[1:], control)
    if num_lanes and mine is not None:
        mine.open_lanes(torch.device("cuda", torch.cuda.current_device()))
    if isinstance(mine, GlooTransport) and axes in ACTIVATION_AXES:
        mine.open_slots()
    return mine


def _new_group(
    ranks: list[int], timeout: timedelta | None, axes: str, options: Any
) -> Any:
    import torch.distributed as dist

    try:
        with only_errors(), places.WAITING:
            return dist.new_group(
                ranks,
                timeout=timeout,
                backend="nccl" if _has_nccl() else None,
                pg_options=options,
                group_desc=axes,
            )
    except RuntimeError as error:
        call = f" in {current_call()}" if current_call() else ""
        raise CommunicationError(
            f"rank {dist.get_rank()}{call}: the {axes} group of ranks {ranks} could not be made; all "
            f"{dist.get_world_size()} ranks make all groups, in the same order. "
            f"{name_stuck_ranks() or 'Look for a rank that took another path'}. Message of the backend: "
            f"{str(error).splitlines()[0]}"
        ) from error


def world_timeout() -> timedelta | None:
    """Return the timeout with which torch.distributed was started, by this package or by the program.

    torch gives other groups its own default, 10 or 30 minutes, instead.
    """
    import torch.distributed as dist

    from .transport import timeout_of

    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return timeout_of(world)


def transport_over(
    process_group: Any,
    axes: str = "",
    lanes: Sequence[Any] = (),
    control: Any = None,
) -> "TorchTransport":
    """Return the transport over one torch ProcessGroup. lanes: others of the same ranks; control: the gloo group of
    the world, both of `TorchTransport`."""
    from .gloo import GlooTransport
    from .transport import TorchTransport

    return (
        TorchTransport(process_group, axes, lanes, control)
        if _has_nccl()
        else GlooTransport(process_group, axes)
    )


def _has_nccl() -> bool:
    import torch.distributed as dist

    return "nccl" in dist.get_backend_config()
