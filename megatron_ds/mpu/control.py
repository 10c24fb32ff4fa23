"""Control messages of a job on GPUs: objects, names and shapes, between hosts, beside NCCL.

NCCL carries tensors of GPUs alone. For all else there is one gloo group over the world, whose ranks connect when
they first exchange a message. With a gloo backend in each group, as torch makes them by default, a rank of 1,024
would open a thousand connections for each group over the world. Here objects travel in a ring, so a rank has two
connections for each group in which it exchanges some, and one for each neighbour in a pipeline.
"""

import atexit
import os
import pickle
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LAZY = "TORCH_GLOO_LAZY_INIT"
FIRST_TAG = 1 << 21  # above those of channels and of `exchange`
NUM_TAGS = 1 << 20
_of_world: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def control_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the gloo group of the world of torch.distributed. Collective over the world when first asked for."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    if world not in _of_world:
        _of_world.clear()
        _of_world[world] = new_lazy_group(timeout)
    return _of_world[world]


def new_lazy_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a gloo group over the world whose ranks connect at their first message. Collective over the world."""
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        return dist.new_group(timeout=timeout, backend="gloo", group_desc="control")
    finally:
        del os.environ[LAZY]
        os.environ.update({} if before is None else {LAZY: before})


def forget() -> None:
    """Let go of the group, which torch.distributed destroys: one that outlives the interpreter's threads aborts
    the process."""
    _of_world.clear()


atexit.register(forget)


def ring_gather(
    obj: Any, ranks: Sequence[int], axes: str, control: dist.ProcessGroup
) -> list:
    """Return the picklable objects of `ranks`, in their order. Collective over them.

    Each rank sends to the next what it has last received from the one before: only neighbours connect.
    """
    at = ranks.index(dist.get_rank())
    size = len(ranks)
    after = ranks[(at + 1) % size]
    before = ranks[(at - 1) % size]
    tag = FIRST_TAG + zlib.crc32(axes.encode()) % NUM_TAGS
    packed = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    objects = {at: obj}
    for step in range(1, size):
        # The length goes first: the neighbour makes room for what follows.
        length = torch.tensor([packed.numel()])
        sent = [
            dist.isend(message, after, control, tag) for message in (length, packed)
        ]
        coming = torch.empty_like(length)
        _receive(coming, before, control, tag)
        received = torch.empty(int(coming), dtype=torch.uint8)
        _receive(received, before, control, tag)
        for work in sent:
            if work is not None:  # torch gives None to a rank outside of the group
                work.wait()
        objects[(at - step) % size] = pickle.loads(received.numpy().tobytes())
        packed = received
    return [objects[place] for place in range(size)]


def _receive(
    out: torch.Tensor, source: int, control: dist.ProcessGroup, tag: int
) -> None:
    work = dist.irecv(out, source, control, tag)
    if work is not None:
        work.wait()
