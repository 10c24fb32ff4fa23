"""`deepspeed.comm`: torch.distributed's functions under the names that programs for DeepSpeed call.

    import megatron_ds.compat.deepspeed.comm as dist
    dist.init_distributed()
    if dist.get_rank() == 0: ...
    dist.barrier()

A program of one process needs no process group and no launcher: it is rank 0 of 1, and its collectives do not
change tensors. All other names are those of torch.distributed.
"""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import foreign_name
from ...errors import ConfigError, NotInitializedError
from ...mpu import launch as launching
from ..engine.communication import recorded_call, recorded_objects
from .init_method import launch_by

# backend → the device that it needs
BACKENDS = {None: None, "gloo": "cpu", "nccl": "cuda", "cpu:gloo,cuda:nccl": None}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = launching.DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the process group, unless there is one; also for one rank. Collective over all ranks.

    The launcher's environment sets the rank (torchrun, Slurm, Open MPI). `initialize` calls this function
    itself.

    dist_backend  None: gloo for tensors on CPUs, nccl for those on CUDA. "nccl" is refused without a GPU
    timeout       of a collective
    distributed_port  port of rank 0, unless the launcher has set MASTER_PORT; None: the launcher's port, else
                      29500
    init_method   where the ranks meet: None, "env://", "tcp://HOST:PORT" or "file:///FOLDER/NEW_FILE"
    rank, world_size  without a launcher. Where there is one they must be equal to its numbers
    dist_init_required  False: an error if there is no process group yet
    auto_mpi_discovery, verbose, config  have no effect

    Raises ConfigError for arguments that cannot be met, and CommunicationError when ranks cannot meet.
    """
    if dist.is_initialized():
        return
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    with launching.reported_to_others():
        _check_arguments(dist_backend, dist_init_required)
        launch = launch_by(init_method, rank, world_size)
    launching.start(launch, timeout, alone=True)
    atexit.register(launching.stop)


def _check_arguments(dist_backend: str | None, dist_init_required: bool | None) -> None:
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required=False, but there is no process group yet. Create it before "
            "with torch.distributed.init_process_group, or leave the argument out."
        )
    if dist_backend not in BACKENDS:
        raise ConfigError(
            f"dist_backend={dist_backend!r} is not supported. Leave it out: gloo and nccl are "
            "chosen by where a tensor is."
        )
    if BACKENDS[dist_backend] == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'dist_backend="nccl" needs GPUs, and torch finds none here. Leave it out.'
        )


def is_initialized() -> bool:
    """Return whether there is a process group; False before `init_distributed`, also in a program of one process."""
    return dist.is_initialized()


def is_available() -> bool:
    """Return whether torch was built with torch.distributed."""
    return dist.is_available()


def get_rank(group: Any = None) -> int:
    """Return the rank of this process in the group."""
    return dist.get_rank(group) if _meets() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of the group."""
    return dist.get_world_size(group) if _meets() else 1


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return launching.read_launch().local_rank


def get_world_group() -> Any:
    """Return the group of all ranks; None in a program of one process."""
    return dist.group.WORLD if _meets() else None


def barrier(group: Any = None, **options: Any) -> Any:
    """Wait until all ranks of the group have called it."""
    return dist.barrier(group, **options) if _meets() else None


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensor in place over the group."""
    if not _meets():
        return _done(async_op)
    begin = lambda: dist.all_reduce(tensor, op, group, async_op=True)
    return _recorded("all_reduce", group, tensor.nbytes, async_op, begin)


def broadcast(
    tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False
) -> Any:
    """Copy the tensor of rank `src` to all ranks of the group."""
    if not _meets():
        return _done(async_op)
    begin = lambda: dist.broadcast(tensor, src, group, async_op=True)
    return _recorded("broadcast", group, tensor.nbytes, async_op, begin)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensor to rank `dst`."""
    if not _meets():
        return _done(async_op)
    begin = lambda: dist.reduce(tensor, dst, op, group, async_op=True)
    return _recorded("reduce", group, tensor.nbytes, async_op, begin)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Send a piece of `input` to each rank of the group, and receive one of each in `output`; by default equal
    pieces of the first dimension."""
    if _meets():
        sizes = output_split_sizes, input_split_sizes
        exchange = dist.all_to_all_single
        begin = lambda: exchange(output, input, *sizes, group, async_op=True)
        return _recorded("all_to_all", group, input.nbytes, async_op, begin)
    output.view(-1).copy_(input.view(-1))
    return _done(async_op)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks of the group into `tensor_list`."""
    if _meets():
        num_bytes = sum(piece.nbytes for piece in tensor_list)
        begin = lambda: dist.all_gather(tensor_list, tensor, group, async_op=True)
        return _recorded("all_gather", group, num_bytes, async_op, begin)
    tensor_list[0].copy_(tensor)
    return _done(async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks of the group into one."""
    if _meets():
        gather = dist.all_gather_into_tensor
        begin = lambda: gather(output_tensor, input_tensor, group, async_op=True)
        num_bytes = output_tensor.nbytes
        return _recorded("all_gather", group, num_bytes, async_op, begin)
    output_tensor.view(-1).copy_(input_tensor.view(-1))
    return _done(async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensor over the group, of which each rank receives its piece."""
    if _meets():
        scatter = dist.reduce_scatter_tensor
        begin = lambda: scatter(output, input, op, group, async_op=True)
        return _recorded("reduce_scatter", group, input.nbytes, async_op, begin)
    output.view(-1).copy_(input.view(-1))
    return _done(async_op)


def all_gather_object(object_list: list, obj: Any, group: Any = None) -> None:
    """Gather one object of each rank into `object_list`, as pickles: for trusted peers only."""
    if not _meets():
        object_list[0] = obj
        return
    gather = lambda: dist.all_gather_object(object_list, obj, group)
    recorded_objects("all_gather", _ranks_of(group), gather, lambda: object_list)


def broadcast_object_list(
    object_list: list, src: int, group: Any = None, device: Any = None
) -> None:
    """Send the objects of rank `src` to all ranks, as pickles: for trusted peers only."""
    if _meets():
        send = lambda: dist.broadcast_object_list(object_list, src, group, device)
        recorded_objects("broadcast", _ranks_of(group), send, lambda: object_list)


def send(
    tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0
) -> None:
    """Send the tensor to rank `dst`, which receives it with `recv`."""
    isend(tensor, dst, group, tag).wait()


def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0
) -> Any:
    """`send` in the background."""
    begin = lambda: dist.isend(tensor, dst, group, tag)
    return _recorded("send", group, tensor.nbytes, True, begin)


def destroy_process_group(group: Any = None) -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(dist, name):
        return foreign_name("megatron_ds.comm", name)
    return getattr(dist, name)


def _is_alone() -> bool:
    return launching.read_launch().world_size == 1


def _meets() -> bool:
    """Return whether there are other ranks. Raises NotInitializedError if there is no group with them yet."""
    if dist.is_initialized():
        return True
    if not _is_alone():
        raise NotInitializedError(
            "there is no process group yet: call megatron_ds.init_distributed() or "
            "initialize() first."
        )
    return False


def _recorded(
    operation: str, group: Any, num_bytes: int, async_op: bool, begin: Any
) -> Any:
    """Return a collective that runs, and is in the communication log if there is one."""
    return recorded_call(operation, _ranks_of(group), num_bytes, async_op, begin)


def _ranks_of(group: Any) -> list[int]:
    """Return the ranks of the group; none where this one is not in it."""
    if dist.get_rank(group) < 0:
        return []
    return dist.get_process_group_ranks(group or dist.group.WORLD)


class _Done:
    """The handle of a collective of one process, which is complete."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _done(async_op: bool) -> _Done | None:
    return _Done() if async_op else None
