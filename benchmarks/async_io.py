"""How fast offloaded state moves between memory and a disk: io_uring, threads, and plain reads and writes
beside them.

    python benchmarks/async_io.py                                         4 GiB in the present directory
    python benchmarks/async_io.py --directory /mnt/nvme --size 16 --rounds 5

A scratch file of --size GiB is written and read from end to end, by regions as the optimizer's states are:
two of them are under way at any time, each cut into blocks. `plain` is what `dd` with oflag=direct does: one
block after the other. All use O_DIRECT where the file system allows it, so the page cache does not count;
where it does not, the output begins with a note, and the figures are those of memory. Contestants take turns,
the medians of the rounds are printed, with the fastest and the slowest. CPU is the process's time per GB
moved: what is left for training on a machine whose cores are busy. The bytes are random, as some disks
compress.
"""

import argparse
import logging
import os
import statistics
import time

import torch

from megatron_ds.errors import ConfigError
from megatron_ds.host.async_io import AsyncIO, make_io
from megatron_ds.host.large_pages import aligned_empty
from megatron_ds.host.scratch_file import Region, ScratchFile


class Done:
    """A transfer that has ended."""

    def wait(self) -> None:
        pass


class PlainIO:
    """One system call a block, one after the other, by the caller itself."""

    def __init__(self, block_bytes: int):
        self.block_bytes = block_bytes

    def read(self, fd: int, tensor: torch.Tensor, offset: int) -> Done:
        return self._move(os.preadv, fd, tensor, offset)

    def write(self, fd: int, tensor: torch.Tensor, offset: int) -> Done:
        return self._move(os.pwritev, fd, tensor, offset)

    def close(self) -> None:
        pass

    def _move(self, call, fd: int, tensor: torch.Tensor, offset: int) -> Done:
        view = memoryview(tensor.numpy())
        for start in range(0, len(view), self.block_bytes):
            block = view[start : start + self.block_bytes]
            if call(fd, [block], offset + start) != len(block):
                raise OSError(f"a block at {offset + start} was moved in part")
        return Done()


def sweep(regions: list[Region], buffers: list[torch.Tensor], what: str) -> None:
    """All regions once, as many at a time as there are buffers."""
    under_way = []
    for i, region in enumerate(regions):
        if len(under_way) == len(buffers):
            under_way.pop(0).wait()
        under_way.append(getattr(region, what)(buffers[i % len(buffers)]))
    for work in under_way:
        work.wait()


def engines(arguments: argparse.Namespace) -> dict[str, AsyncIO]:
    """Name → contestant. io_uring is left out where the system has none."""
    block = arguments.block_kib << 10
    found = {
        "plain": PlainIO(block),
        "threads": make_io("threads", threads=arguments.threads, block_bytes=block),
    }
    try:
        found["io_uring"] = make_io(
            "io_uring", queue_depth=arguments.queue_depth, block_bytes=block
        )
    except ConfigError as reason:
        print(f"io_uring is left out: {reason}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--size", type=float, default=4, help="GiB")
    parser.add_argument(
        "--region-mib", type=int, default=64, help="what is asked for at a time"
    )
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument(
        "--queue-depth", type=int, default=32, help="blocks in flight, io_uring"
    )
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")

    contestants = engines(arguments)
    file = ScratchFile(arguments.directory, contestants["plain"])
    nbytes = arguments.region_mib << 20
    regions = [
        file.allocate(nbytes)
        for _ in range(max(1, int(arguments.size * 2**30 / nbytes)))
    ]
    buffers = [aligned_empty(nbytes, torch.uint8).random_() for _ in range(2)]
    # blocks that were never written are slower, or read as zeros without the disk
    sweep(regions, buffers, "write_from")
    seconds = {
        (name, what): [] for what in ("write_from", "read_into") for name in contestants
    }
    cpu = {key: [] for key in seconds}
    for _ in range(arguments.rounds):
        for name, what in seconds:
            file.io = contestants[name]
            start = time.perf_counter()
            busy = time.process_time()
            sweep(regions, buffers, what)
            seconds[name, what].append(time.perf_counter() - start)
            cpu[name, what].append(time.process_time() - busy)
    gigabytes = len(regions) * nbytes / 1e9
    for (name, what), times in seconds.items():
        speed = [
            gigabytes / t for t in (statistics.median(times), max(times), min(times))
        ]
        print(
            f"{what.split('_')[0]:5s} | {name:8s} | {speed[0]:6.2f} GB/s ({speed[1]:.2f} to "
            f"{speed[2]:.2f}) | {statistics.median(cpu[name, what]) / gigabytes * 1e3:6.1f} ms CPU per GB"
        )
    file.close()
    for io in contestants.values():
        io.close()


if __name__ == "__main__":
    main()
