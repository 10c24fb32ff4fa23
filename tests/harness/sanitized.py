"""Emulated kernels under the sanitizers of g++.

    report = sanitize("thread", lambda: rms_norm(x, weight, 1e-5))       # "" or what the sanitizer printed

"thread" finds accesses to one address without a barrier between them, in a block or in two blocks. "address"
finds accesses outside of tensors and arrays, misaligned packets and undefined arithmetic.

The launches run in the emulator of a fork of this process, are recorded with their tensors, and run again in
a program that is compiled with the sanitizer and has no Python in it, since a sanitizer must be in a process
from its start.
"""

import ctypes
import os
import pickle
import shutil
import struct
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unittest import mock

import torch

from megatron_ds.extensions.kernels.gpu.gpu_kernel import FORMATS, GpuKernel
from tests.harness.emulated import SOURCES, built, compile_together, emulated_gpu
from tests.harness.limits import HUNG

FLAGS = {
    "thread": ("-fsanitize=thread", "-g1"),
    "address": ("-fsanitize=address,undefined", "-g1"),
}
OPTIONS = {"TSAN_OPTIONS": "history_size=2", "UBSAN_OPTIONS": "print_stacktrace=1"}
SEED = 3


@cache
def missing(kind: str) -> str:
    """ "" if this machine can run the sanitizer, else the reason why not."""
    library = {"thread": "libtsan.so", "address": "libasan.so"}[kind]
    found = subprocess.run(
        ["g++", f"-print-file-name={library}"],
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(found.stdout.strip()).is_file():
        return f"g++ has no {library}"
    # ThreadSanitizer needs the program at the usual addresses.
    if kind == "thread" and (
        not shutil.which("setarch")
        or subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode
    ):
        return "setarch cannot turn off the randomization of addresses"
    return ""


class Launch(NamedTuple):
    """A recorded launch: an instantiation, and the bytes that replay.h reads."""

    file: str
    expression: str
    data: bytes


def sanitize(kind: str, run: Callable[[], object], sources: Path = SOURCES) -> str:
    """What the sanitizer prints of the launches of `run`, "" if it has no findings."""
    launches, error = _launches_of(run, sources)
    reports = [
        _report(
            kind, sources / file, [launch for launch in launches if launch.file == file]
        )
        for file in dict.fromkeys(launch.file for launch in launches)
    ]
    return "".join(reports) or error


def _launches_of(run: Callable[[], object], sources: Path) -> tuple[list[Launch], str]:
    """The launches of `run`, and how it failed. It runs in a fork, which a wrong kernel may end: each launch
    is written before it starts."""
    compile_together(run, sources=sources)
    with tempfile.TemporaryFile() as record:
        child = os.fork()
        if not child:
            try:
                with emulated_gpu(SEED, sources=sources), _recorded(record):
                    run()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        record.seek(0)
        launches = []
        while record.peek(1):
            launches.append(pickle.load(record))
    assert launches, "nothing was launched"
    return launches, f"the launches end with status {status}" if status else ""


def _report(kind: str, file: Path, launches: list[Launch]) -> str:
    calls = "".join(f"    replay.launch({launch.expression});\n" for launch in launches)
    text = (
        f'#include "{file.name}"\n#include "replay.h"\n'
        f"int main(int, char** words) {{\n    Replay replay(words[1], {SEED});\n{calls}}}\n"
    )
    program = built(file, text, FLAGS[kind])
    with tempfile.NamedTemporaryFile() as data:
        data.write(b"".join(launch.data for launch in launches))
        data.flush()
        words = ["setarch", "-R"] if kind == "thread" else []
        done = subprocess.run(
            [*words, program, data.name],
            capture_output=True,
            text=True,
            timeout=HUNG,
            env=dict(os.environ, **OPTIONS),
        )
    return done.stderr or (
        "" if done.returncode == 0 else f"exit code {done.returncode}"
    )


@contextmanager
def _recorded(record: BinaryIO) -> Iterator[None]:
    """Within the context launches are written to `record`, with the tensors as they are before each."""
    call = GpuKernel.__call__

    def recording(
        kernel: GpuKernel, template: tuple, grid: Any, threads: int, *arguments: Any
    ) -> None:
        data = _data(kernel, grid, threads, arguments)
        pickle.dump(Launch(kernel.file, kernel.expression(template), data), record)
        record.flush()
        call(kernel, template, grid, threads, *arguments)

    with mock.patch.object(GpuKernel, "__call__", recording):
        yield


def _data(
    kernel: GpuKernel, grid: int | tuple, threads: int, arguments: tuple
) -> bytes:
    """A launch in the format of replay.h. Tensors that share memory are one tensor there."""
    sizes = [*((grid,) if isinstance(grid, int) else grid), 1, 1][:3]
    storages = {
        a.untyped_storage().data_ptr(): a.untyped_storage()
        for a in arguments
        if isinstance(a, torch.Tensor)
    }
    places = list(storages)
    data = struct.pack("7q", *sizes, threads, 1, 1, len(storages))
    for storage in storages.values():
        data += _sized(
            ctypes.string_at(storage.data_ptr(), storage.nbytes())
            if storage.nbytes()
            else b""
        )
    data += struct.pack("q", len(arguments))
    for argument, kind in zip(arguments, kernel.types, strict=True):
        if isinstance(argument, torch.Tensor):
            place = argument.untyped_storage().data_ptr()
            data += struct.pack(
                "qqq", places.index(place), 8, argument.data_ptr() - place
            )
        else:
            data += struct.pack("q", -1) + _sized(
                struct.pack(f"@{FORMATS[kind]}", argument or 0)
            )
    return data


def _sized(content: bytes) -> bytes:
    return struct.pack("q", len(content)) + content + bytes(-len(content) % 8)
