"""A program for the ranks of the launcher's tests: steps on a fake GPU, of which the device of one rank does not go
on, so that those of all others wait in the reduction of gradients. All hosts are a step ahead and wait for their
devices.

python stuck_device.py RANK
"""

import os
import sys

import torch

from megatron_ds.host import places
from megatron_ds.mpu.host_reads import wait_until
from megatron_ds.pipeline.device_place import DevicePlace
from megatron_ds.pipeline.instruction import Instruction, Op
from tests.harness.fake_cuda import FakeGpu, fake_cuda

PROGRAM = [
    Instruction(Op.F, 0, 0),
    Instruction(Op.B, 0, 0),
    Instruction(Op.F, 0, 1),
    Instruction(Op.REDUCE, 0),
    Instruction(Op.B, 0, 1),
]
STEPS = 3
RECORD = b"the last collectives"


def main() -> None:
    """Run steps, of which the last one does not end."""
    rank = int(os.environ["RANK"])
    stops_at = Op.F if rank == int(sys.argv[-1]) else Op.REDUCE
    places.open_places(os.environ, rank)
    torch._C._distributed_c10d._dump_nccl_trace = lambda: RECORD
    with fake_cuda(), FakeGpu() as gpu:
        device = DevicePlace()
        for step in range(STEPS + 1):
            run(device, gpu, stops_at if step == STEPS else None)
            places.writer().step(step + 1)


def run(device: DevicePlace, gpu: FakeGpu, stops_at: Op | None) -> None:
    """Launch a step, and wait for its end. stops_at: the instruction at which the device stops"""
    device.begin()
    for i in PROGRAM:
        places.writer().instruction(*i)
        gpu.is_stuck |= i.op is stops_at and i.microbatch != 0
        device.add(i)
    end = torch.cuda.current_stream().record_event()
    wait_until(end.query)


if __name__ == "__main__":
    main()
