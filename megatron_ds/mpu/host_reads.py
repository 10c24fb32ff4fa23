"""Values of a GPU on the host, and waits of the host for it, each by the one wait that has an end.

    to_host(values, group)          values.cpu()              read_numbers(values, group)     values.tolist()
    read_number(value, group)       value.item()              wait_for_mark(mark)             event.synchronize()
    wait_for_work(device, group)    torch.cuda.synchronize(), for the current stream

Use these wherever the work before may include a collective: tests/mpu/test_unbounded_waits.py finds the plain ones.
group: the ranks whose timeout limits the wait, and whose error is raised; None: all ranks of torch.distributed.
On a CPU, and without other ranks, they are the plain reads.
"""

from collections.abc import Callable

import torch

from ..host.places import WAITING_FOR_DEVICE
from ..host.side_streams import Mark
from .device_wait import Failing, wait_for_device
from .group import Group


def to_host(values: torch.Tensor, group: Group | None = None) -> torch.Tensor:
    """`values.cpu()`, of a GPU in page-locked memory of torch: for few numbers.

    Raises CommunicationError, with the ranks that are stuck, if the GPU does not come to the values in time.
    """
    transport = _transport(group) if values.is_cuda else None
    if transport is None:
        return values.cpu()
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values.detach(), non_blocking=True)
    _wait(_event(values.device).query, transport)
    return on_host


def read_numbers(numbers: torch.Tensor, group: Group | None = None) -> list:
    """`numbers.tolist()`. Raises as `to_host` does."""
    return to_host(numbers, group).tolist()


def read_number(number: torch.Tensor, group: Group | None = None) -> bool | int | float:
    """`number.item()`. Raises as `to_host` does."""
    return to_host(number, group).item()


def wait_for_work(device: torch.device, group: Group | None = None) -> None:
    """Return when what is queued on the current stream of a GPU is done. A plain read of its results then waits
    for no other rank. Raises as `to_host` does."""
    if device.type == "cuda":
        wait_until(_event(device).query, group)


def wait_for_mark(mark: Mark) -> None:
    """Return when a mark is reached, by the thread that trains. Raises as `to_host` does."""
    wait_until(mark.is_completed)


def wait_for_mark_in_thread(mark: Mark) -> None:
    """`wait_for_mark`, by a thread beside the one that trains, to which it leaves the interpreter."""
    wait_for_device(mark.is_completed, _transport(None), spin_seconds=0)


def wait_until(is_reached: Callable[[], bool], group: Group | None = None) -> None:
    """Return when `is_reached` does so with True, such as the query of an event. Raises as `to_host` does."""
    if not is_reached():
        _wait(is_reached, _transport(group))


def _wait(is_reached: Callable[[], bool], transport: Failing | None) -> None:
    with WAITING_FOR_DEVICE:
        wait_for_device(is_reached, transport)


def _event(device: torch.device) -> torch.cuda.Event:
    """Return the end of what is queued on the current stream of a GPU, which may not be the current one."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _transport(group: Group | None) -> Failing | None:
    """Return what connects the ranks; None without others."""
    if group is not None:
        return group.transport
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    from .process_groups import transport_over

    return transport_over(dist.group.WORLD, "world")
