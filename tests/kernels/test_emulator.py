"""The emulator of GPU threads: what CUDA C++ means in it, and the faults that it finds.

The kernels are in planted.cu. Faults that only sanitizers find are in test_sanitizers.py.
"""

import struct
from pathlib import Path

import pytest
import torch

from megatron_ds.extensions.kernels.gpu.gpu_kernel import GpuKernel
from tests.harness.emulated import (
    SEEDS,
    EmulationError,
    compile_expressions,
    emulated_gpu,
)

PLANTED = Path(__file__).parent / "planted.cu"
LINES = {
    line.partition("// @")[2]: number
    for number, line in enumerate(PLANTED.read_text().splitlines(), 1)
    if "// @" in line
}
KERNELS = [
    "exchanges",
    *(
        f"{kind}<{name}>"
        for kind in ("narrowed", "widened")
        for name in ("bf16", "fp16")
    ),
    "upper_halves",
    "atomics",
    "three_dims",
    "all_types",
    "half_a_warp_in_a_shuffle",
    "mask_of_half_a_warp",
    "barrier_after_some_returned",
    "barriers_in_two_branches",
    "shared_memory_not_written",
    "missing_barrier",
    "blocks_that_share_an_address",
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    compile_expressions(PLANTED, KERNELS)


def run(name, arguments, *values, template=(), grid=1, threads=64, seed=0):
    with emulated_gpu(seed, sources=PLANTED.parent):
        GpuKernel(PLANTED.name, name, arguments)(template, grid, threads, *values)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_exchange_values_as_cuda_defines(seed):
    out = torch.zeros(7, 64, dtype=torch.int32)
    run("exchanges", "ptr", out, seed=seed)
    i = torch.arange(64)
    lane, warp = i % 32, i // 32 * 32
    votes = [
        sum(1 << (j % 32) for j in range(w, w + 32) if j % 3 == 0) for w in (0, 32)
    ]
    expected = [
        warp + (lane ^ 5),
        warp + 7,
        torch.where(lane < 29, i + 3, i),
        torch.where(lane >= 3, i - 3, i),
        i // 8 * 8 + 2,
        torch.tensor([votes[w // 32] for w in warp.tolist()]),
        torch.where(i < 32, 1, 2),
    ]
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want.to(torch.int32))


@pytest.mark.parametrize(
    "dtype, name", [(torch.float16, "fp16"), (torch.bfloat16, "bf16")], ids=str
)
def test_sixteen_bit_numbers_convert_as_in_torch(dtype, name):
    """All 65536 patterns to fp32; to 16 bits all these numbers, those halfway between two, and neighbours."""
    patterns = (
        torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    )
    exact = torch.empty(65536)
    run("widened", "ptr ptr", patterns, exact, template=(name,), grid=256, threads=256)
    assert torch.equal(exact[~exact.isnan()], patterns.float()[~exact.isnan()])
    assert torch.equal(exact.isnan(), patterns.isnan())

    half = 0x8000 if name == "bf16" else 0x1000
    around = [
        exact.view(torch.int32) + shift
        for shift in (-1, 0, 1, half - 1, half, half + 1)
    ]
    subnormal = torch.arange(-32768, 32768) * (
        2.0**-27 * 1.0000001
    )  # of fp16, and below
    for x in (*(bits.view(torch.float32) for bits in around), subnormal):
        got, finite = torch.empty(65536, dtype=dtype), ~x.isnan()
        run("narrowed", "ptr ptr", x, got, template=(name,), grid=256, threads=256)
        assert torch.equal(
            got.view(torch.int16)[finite], x.to(dtype).view(torch.int16)[finite]
        )
        assert got[~finite].isnan().all()


def test_upper_halves_of_products_equal_those_of_python():
    torch.manual_seed(0)
    x = torch.randint(-(2**63), 2**63 - 1, (2, 64))
    y = torch.empty(64, dtype=torch.int64)
    run("upper_halves", "ptr ptr", x, y)
    first, second = ([v % 2**64 for v in row] for row in x.tolist())
    assert [v % 2**64 for v in y.tolist()] == [
        a * b >> 64 for a, b in zip(first, second, strict=True)
    ]


def test_atomics_of_several_blocks_lose_nothing():
    total, largest = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    run("atomics", "ptr ptr", total, largest, grid=3, threads=70)
    assert (total.item(), largest.item()) == (3 * 69 * 35, 2 * 69)


def test_grids_of_three_dims_are_numbered_as_in_cuda():
    out = torch.zeros(2 * 3 * 5, 7, dtype=torch.int32)
    run("three_dims", "ptr", out, grid=(2, 3, 5), threads=7)
    assert torch.equal(
        out, torch.arange(30, dtype=torch.int32)[:, None] * 100 + torch.arange(7)
    )


def test_arguments_of_all_types_arrive():
    """Mixed sizes need the gaps of native alignment."""
    out = torch.zeros(6, dtype=torch.float64)
    run(
        "all_types",
        "i32 ptr f32 i64 u32 u64 ptr",
        -3,
        torch.tensor([0.5]),
        0.1,
        -(2**40),
        2**31 + 1,
        2**53,
        out,
    )
    single = struct.unpack("f", struct.pack("f", 0.1))[0]
    assert out.tolist() == [-3, 0.5, single, -(2**40), 2**31 + 1, 2**53]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault, message",
    [
        (
            "half_a_warp_in_a_shuffle",
            "planted.cu:{shuffle}: waits for threads that returned",
        ),
        ("mask_of_half_a_warp", "planted.cu:{mask}: the mask leaves out lanes"),
        (
            "barrier_after_some_returned",
            "planted.cu:{barrier}: waits for threads that returned",
        ),
        (
            "barriers_in_two_branches",
            "planted.cu:({first}: .* at line {second}|{second}: .* at line {first})",
        ),
    ],
)
def test_threads_that_part_are_an_error_with_its_line(fault, message, seed):
    with pytest.raises(EmulationError, match=", " + message.format(**LINES)):
        run(fault, "ptr", torch.ones(64), seed=seed)


def test_a_launch_after_an_error_is_as_good_as_any():
    with pytest.raises(EmulationError):
        run("barriers_in_two_branches", "ptr", torch.ones(64))
    test_lanes_exchange_values_as_cuda_defines(0)


def test_shared_memory_that_is_not_written_is_nan():
    x = torch.zeros(64)
    run("shared_memory_not_written", "ptr", x)
    assert x[63].isnan() and (x[:63] == 1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_changes_the_result(seed):
    x = torch.zeros(64)
    run("missing_barrier", "ptr", x, seed=seed)
    assert x.isnan().any()


def test_the_order_of_blocks_differs_between_seeds():
    results = []
    for seed in range(4):
        x = torch.zeros(1)
        run("blocks_that_share_an_address", "ptr", x, grid=5, seed=seed)
        results.append(x.item())
    assert len(set(results)) > 1


@pytest.mark.parametrize("grid, threads", [((1, 65536), 32), (1, 1025)])
def test_sizes_that_no_gpu_takes_are_an_error(grid, threads):
    with pytest.raises(EmulationError, match="no GPU takes grid"):
        run("missing_barrier", "ptr", torch.zeros(64), grid=grid, threads=threads)
