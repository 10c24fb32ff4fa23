"""Copies of tensors between host and device, beside what the current stream does."""

from collections.abc import Iterable

import torch

from ..host.side_streams import Mark, side_stream
from ..mpu.host_reads import wait_for_mark


def copy_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first. The host waits once for those between devices."""
    near = []
    marks = {}  # of the last copy in each direction
    for out, values in pairs:
        if out.device == values.device:
            near.append((out, values))
        else:
            marks[out.is_cuda] = begin_copy(out, values)
    if near:
        outs, sources = zip(*near)
        torch._foreach_copy_(outs, sources)
    for mark in marks.values():
        wait_for_mark(mark)


def begin_copy(out: torch.Tensor, values: torch.Tensor) -> Mark:
    """Begin to copy. Between host and GPU on a stream for copies in this direction, after what the current one has."""
    if out.is_cuda == values.is_cuda:
        out.copy_(values, non_blocking=True)
        return Mark()
    stream = (
        side_stream(out.device, "to device")
        if out.is_cuda
        else side_stream(values.device, "to host")
    )
    with stream.behind_current():
        out.copy_(values, non_blocking=True)
    return stream.mark()
