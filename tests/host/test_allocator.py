"""What `set_allocator` does with glibc, seen from outside: where blocks lie, whether their pages stay, and
which tensors lie on huge pages. Preloaded allocators are in test_preloaded_allocators.py.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.training import distributed

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2, together=True)]

JOB = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 "
    "--global-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --vocab-size 16"
).split()
LARGE = (
    "--micro-batch-size 131072 --global-batch-size 131072".split()
)  # hidden states of 16 MiB

# In a process of its own, as the settings last. A thread that is new takes its block from the main heap when
# there is one arena only, else from a mapping of its own; a freed block stays resident when it is kept.
PROBE = """
import ctypes, sys, threading
from megatron_ds.host.allocator import set_allocator
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
assert sys.argv[1] == "none" or set_allocator(keep_freed=sys.argv[1] == "keep").is_ours

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) // 256

def of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(libc.malloc(100_000)))
    thread.start()
    thread.join()
    return found[0]

[heap] = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
start, stop = (int(end, 16) for end in heap)
inside = start <= of_a_thread() < stop + (1 << 28)
block = libc.malloc(64 << 20)
ctypes.memset(block, 1, 64 << 20)
before = resident_mib()
libc.free(block)
kept = before - resident_mib() < 32
held = []
for _ in range(4):                          # from the second on it is heap memory, unless set otherwise
    block = libc.malloc(24 << 20)
    ctypes.memset(block, 1, 24 << 20)
    held.append(libc.malloc(100_000))       # above it, so that the heap cannot shrink
    before = resident_mib()
    libc.free(block)
print(inside, kept, before - resident_mib() < 12)
"""


# Whether the kernel has advice to use huge pages ("hg") for a tensor of 8 MiB.
HUGE_PAGES = """
import sys
from megatron_ds.host.allocator import set_allocator
assert sys.argv[1] == "none" or set_allocator(keep_freed=sys.argv[1] == "keep").is_ours
import torch
tensor = torch.empty(2 << 20)
address = tensor.data_ptr() + (4 << 20)
here = False
for line in open("/proc/self/smaps"):
    first, *rest = line.split()
    if "-" in first:
        start, stop = (int(end, 16) for end in first.split("-"))
        here = start <= address < stop
    elif here and first == "VmFlags:":
        print("hg" in rest)
"""


def without_preload(**variables):
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
    } | variables


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
@pytest.mark.parametrize(
    "asked, one_arena, kept, later",
    [
        ("none", False, False, True),
        ("return", True, False, False),
        ("keep", True, True, True),
    ],
)
def test_threads_share_the_main_heap_and_freed_memory_is_kept_if_asked(
    asked, one_arena, kept, later
):
    said = subprocess.run(
        [sys.executable, "-c", PROBE, asked],
        capture_output=True,
        text=True,
        check=True,
        env=without_preload(),
    ).stdout.split()
    assert said == [str(one_arena), str(kept), str(later)]


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no huge pages"
)
@pytest.mark.parametrize(
    "asked, variables, huge",
    [
        ("none", {}, False),
        ("keep", {}, False),
        ("return", {}, True),
        ("return", {"THP_MEM_ALLOC_ENABLE": "0"}, False),
        ("keep", {"THP_MEM_ALLOC_ENABLE": "1"}, True),
    ],
)
def test_tensors_lie_on_huge_pages_where_memory_is_returned_unless_the_user_chose(
    asked, variables, huge
):
    printed = subprocess.run(
        [sys.executable, "-c", HUGE_PAGES, asked],
        capture_output=True,
        text=True,
        check=True,
        env=without_preload(**variables),
    ).stdout.split()
    assert printed == [str(huge)]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on CUDA devices the allocator stays as it is"
)
@pytest.mark.parametrize(
    "flags, kept",
    [
        ([], True),
        (["--zero-stage", "1", "--offload-optimizer", "cpu"], False),
        (["--recompute-granularity", "full"], False),
        (["--tiled-mlp", "2"], False),
        (["--tiled-logits"], False),
        (["--recompute-granularity", "selective"], True),
        (["--context-parallel-size", "2"], True),
        (LARGE, False),
        (["--context-parallel-size", "2", *LARGE], False),
    ],
)
def test_the_allocator_is_set_before_ranks_are_met_and_keeps_memory_unless_it_is_scarce(
    flags, kept, monkeypatch
):
    events, start = [], distributed.launching.start
    monkeypatch.setattr(
        distributed, "set_allocator", lambda keep_freed: events.append(keep_freed)
    )
    monkeypatch.setattr(
        distributed.launching,
        "start",
        lambda *arguments: events.append("start") or start(*arguments),
    )
    config = parse(
        [*JOB, *flags], world_size=2 if "--context-parallel-size" in flags else 1
    )
    assert distributed.is_memory_scarce(config) != kept
    if config.world_size == 1:
        with distributed.joined(config, Launch()):
            assert events == [kept, "start"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or torch.cuda.is_available(), reason="of CPUs"
)
def test_a_run_prints_what_happens_with_freed_memory():
    ran = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *JOB],
        capture_output=True,
        text=True,
        check=True,
        env=without_preload(OMP_NUM_THREADS="1"),
    )
    lines = re.findall("^.*allocator: .*$", ran.stdout + ran.stderr, re.MULTILINE)
    assert len(lines) == 1 and re.search(
        r"allocator: glibc 2\.\d+, freed memory is kept$", lines[0]
    )
