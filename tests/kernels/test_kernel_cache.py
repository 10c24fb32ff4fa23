"""The cache of compiled kernels: what it finds, and what it does where it cannot be read or written."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import kernel_cache, norm_kernels
from megatron_ds.extensions.kernels.gpu.kernel_cache import (
    CompiledKernel,
    KernelCache,
    cache_folder,
    cache_key,
)
from megatron_ds.extensions.kernels.gpu.kernel_sources import KernelSource
from tests.harness.limits import HUNG
from tests.harness.stand_in_gpu import stand_in_gpu

KERNEL = CompiledKernel("_Z6kernelv", b"\x7fELF\0\0code\0with zeros" * 99)
KEY = "ab" * 32


@pytest.fixture(autouse=True)
def _warnings_anew():
    kernel_cache._warn_of.cache_clear()


def test_a_kernel_is_read_as_it_was_written(tmp_path):
    KernelCache(tmp_path / "new/folder").write(KEY, KERNEL)
    assert KernelCache(tmp_path / "new/folder").read(KEY) == KERNEL
    assert [p.name for p in (tmp_path / "new/folder").iterdir()] == [KEY]


def test_an_absent_kernel_and_an_absent_folder_are_none(tmp_path):
    for folder in (tmp_path, tmp_path / "absent", None):
        assert KernelCache(folder).read(KEY) is None
    KernelCache(None).write(KEY, KERNEL)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:30],
        lambda content: content.replace(b"code", b"c0de", 1),
        lambda content: content + b"\0",
        lambda content: content.replace(b"kernel 2", b"kernel 1"),
    ],
    ids=["empty", "cut", "cut head", "one letter", "longer", "another format"],
)
def test_a_damaged_file_is_none_and_is_written_anew(tmp_path, caplog, damage):
    cache, file = KernelCache(tmp_path), tmp_path / KEY
    cache.write(KEY, KERNEL)
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert cache.read(KEY) is None
    assert f"{file} is damaged" in caplog.text
    cache.write(KEY, KERNEL)
    assert cache.read(KEY) == KERNEL


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            KernelCache(tmp_path / "file/kernels").write(KEY, KERNEL)
    assert len(caplog.records) == 1
    assert (
        "cannot be written (Not a directory): each process compiles its kernels"
        in caplog.text
    )


@pytest.mark.parametrize("call", ["mkdir", "mkstemp", "fdopen", "replace"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, caplog, monkeypatch, call):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    place = {"mkdir": Path, "mkstemp": kernel_cache.tempfile}.get(call, kernel_cache.os)
    monkeypatch.setattr(place, call, full)
    with caplog.at_level(logging.WARNING):
        KernelCache(tmp_path).write(KEY, KERNEL)
    assert (
        "No space left on device" in caplog.text and "MEGATRON_DS_CACHE" in caplog.text
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_in_the_middle_of_a_file_leaves_nothing_behind(
    tmp_path, caplog, monkeypatch
):
    """/dev/full accepts no byte; the buffered writer learns it when it closes."""
    monkeypatch.setattr(
        kernel_cache.os,
        "fdopen",
        lambda descriptor, mode: (os.close(descriptor), open("/dev/full", mode))[1],
    )
    KernelCache(tmp_path).write(KEY, KERNEL)
    assert "No space left on device" in caplog.text and not list(tmp_path.iterdir())


def test_the_folder_follows_the_environment():
    home = os.path.expanduser("~/.cache/megatron_ds/kernels")
    assert cache_folder({"MEGATRON_DS_CACHE": "/fast", "XDG_CACHE_HOME": "/x"}) == Path(
        "/fast/kernels"
    )
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/megatron_ds/kernels")
    assert (
        cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({}) == Path(home)
    )
    assert cache_folder({"MEGATRON_DS_CACHE": "~/here"}) == Path(
        os.path.expanduser("~/here/kernels")
    )


def test_the_key_depends_on_all_that_the_code_depends_on():
    source = KernelSource("a.cu", "text", (("b.cuh", "more"),))
    inputs = [(source, "k<1>", "nvrtc 13.0", ("--gpu-architecture=sm_90",))]
    inputs += [
        (source, "k<2>", *inputs[0][2:]),
        (source, "k<1>", "nvrtc 13.1", inputs[0][3]),
        (source, "k<1>", "nvrtc 13.0", ("--gpu-architecture=sm_80",)),
        (KernelSource("a.cu", "text", (("b.cuh", "other"),)), *inputs[0][1:]),
        (KernelSource("a.cu", "edited", source.headers), *inputs[0][1:]),
    ]
    keys = [cache_key(*each) for each in inputs]
    assert len(set(keys)) == len(inputs)
    assert keys[0] == cache_key(*inputs[0]) and set(keys[0]) <= set("0123456789abcdef")


def normalized(cache):
    """(launches, kernels compiled) of one RMSNorm with this cache."""
    x = torch.ones(3, 264)
    with stand_in_gpu(cache) as gpu:
        y = norm_kernels.rms_norm(x, torch.ones(264), 0.0)
    assert torch.equal(y, x)
    return gpu.compiler.compilations


def test_the_second_run_compiles_nothing(tmp_path):
    assert len(normalized(tmp_path)) == 1
    assert len(normalized(tmp_path)) == 0
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert len(normalized(tmp_path)) == 1
    assert len(normalized(tmp_path)) == 0


def test_an_operation_runs_where_no_cache_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", None):
        assert len(normalized(folder)) == 1


PROCESS = """
import random, sys
from pathlib import Path
from megatron_ds.extensions.kernels.gpu.kernel_cache import CompiledKernel, KernelCache
cache, kernel, found = KernelCache(Path(sys.argv[1])), CompiledKernel("k", bytes(range(256)) * 200), 0
random.seed(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for i in range(2000):
    key = f"{random.randrange(3):064d}"
    read = cache.read(key)
    assert read in (None, kernel)
    found += read is not None
    if read is None:
        cache.write(key, kernel)
    elif random.random() < 0.2:
        (cache.folder / key).unlink(missing_ok=True)
print(found)
"""


@pytest.mark.rest
def test_two_processes_at_once_need_no_lock(tmp_path):
    """Each finds a whole file or none, also while the other writes the same one or deletes it."""
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(seed)],
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=HUNG) for process in both]
    assert [process.returncode for process in both] == [0, 0] and not any(
        e for _, e in results
    ), results
    assert all(int(found) > 1000 for found, _ in results)
    assert not list(tmp_path.glob(".*"))
