"""AdamW on GPUs has the bits of the reference, in torch's operations and in C++: dtypes, rows and cuts."""

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import adam_kernels
from megatron_ds.mpu.param_spec import Init, ParamSpec
from megatron_ds.ops.adam import adamw, reference_adamw_
from megatron_ds.ops.update_rows import UNCORRECTED, AdamRow, AdamStep
from megatron_ds.optim import default_groups, row_adamw
from megatron_ds.optim.row_adamw import RowAdamW
from megatron_ds.zero.layout import SlotPiece
from megatron_ds.zero.shard_optimizer import ShardOptimizer, make_leaf
from tests.harness.emulated import SEEDS, compile_together, emulated_gpu

HYPER = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SIZES = (1, 7, 0, 1024, 4099, 2048, 5)  # several chunks of 2048, and parts of one
DTYPES = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, None),
]


def randn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def rows(grad=torch.float32, low=None, sizes=SIZES, steps=lambda i: 3):
    """Fresh tensors in the middle of a training."""
    return [
        AdamRow(
            randn(n, i),
            randn(n, i + 100).to(grad),
            randn(n, i + 200) * 0.1,
            randn(n, i + 300) ** 2,
            steps(i),
            None if low is None else torch.zeros(n, dtype=low),
        )
        for i, n in enumerate(sizes)
    ]


def on_gpu(made, seed=0, **numbers):
    with emulated_gpu(seed) as gpu:
        adam_kernels.adamw(made[0].grad, made, AdamStep(**HYPER | numbers))
    return gpu.launches


def bits(made):
    tensors = [
        t
        for r in made
        for t in (r.p, r.m, r.v, r.grad, *([] if r.low is None else [r.low]))
    ]
    return [
        t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in tensors
    ]


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def wide(made):
    """The results with fp32 gradients, which the reference takes."""
    return [r._replace(grad=r.grad.float()) for r in made]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All instantiations in one call of g++."""
    compile_together(
        lambda: [
            adam_kernels.adamw(made[0].grad, made, AdamStep(**HYPER))
            for made in (rows(*dtypes) for dtypes in DTYPES)
        ]
    )


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_one_launch_for_all_rows_has_the_bits_of_the_reference(dtypes):
    ours, plain = rows(*dtypes), wide(rows(*dtypes))
    assert len(on_gpu(ours, divisor=3.0)) == 1
    reference_adamw_(plain, **HYPER, grad_scale=1 / 3)
    assert same_bits(wide(ours), plain)


def test_moments_are_used_as_they_are_at_the_step_uncorrected():
    ours, plain = (
        rows(sizes=(70, 1000), steps=lambda i: UNCORRECTED) for _ in range(2)
    )
    on_gpu(ours)
    reference_adamw_(plain, **HYPER)
    assert same_bits(ours, plain)


def test_the_contract_of_implementations_covers_the_bits_of_the_compiled_one():
    ours, other = rows(low=torch.bfloat16), rows(low=torch.bfloat16)
    on_gpu(ours, divisor=7.0)
    adamw(other[0].grad, other, AdamStep(**HYPER, divisor=7.0))
    assert same_bits(ours, other)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("chunk", [4, 64, 8192])
def test_cuts_order_and_chunks_change_no_bit(seed, chunk, monkeypatch):
    whole, parts = (
        rows(low=torch.bfloat16, sizes=(1000,)),
        rows(low=torch.bfloat16, sizes=(1000,)),
    )
    on_gpu(whole)
    monkeypatch.setattr(adam_kernels, "SHORT_CHUNK", chunk)
    cuts = (0, 1, 64, 100, 333, 960, 1000)  # of which three are not aligned
    cut = [
        AdamRow(*(t[a:b] for t in parts[0][:4]), 3, parts[0].low[a:b])
        for a, b in zip(cuts, cuts[1:])
    ]
    on_gpu(cut, seed)
    assert same_bits(whole, parts)


def test_rows_of_other_steps_and_dtypes_are_launches_of_their_own():
    mixed = [
        rows(low=torch.bfloat16, sizes=(70,), steps=lambda i: 1)[0],
        rows(sizes=(70,))[0],
        rows(low=torch.bfloat16, sizes=(70,), steps=lambda i: 1)[0],
        rows(low=torch.bfloat16, sizes=(70,), steps=lambda i: 9)[0],
    ]
    plain = [
        r._replace(
            **{name: getattr(r, name).clone() for name in ("p", "m", "v")},
            low=None if r.low is None else r.low.clone(),
        )
        for r in mixed
    ]
    assert len(on_gpu(mixed)) == 3
    reference_adamw_(plain, **HYPER)
    assert same_bits(mixed, plain)


@pytest.mark.parametrize("divisor", [1.0, 3.0, 65536.0, 1.7e-3, float("inf")])
def test_a_divisor_on_the_device_has_the_bits_of_the_same_number_on_the_host(divisor):
    host, device = rows(), rows()
    on_gpu(host, divisor=divisor)
    on_gpu(device, divisor=torch.tensor(divisor))
    assert same_bits(host, device)


def test_a_flag_on_the_device_skips_the_update():
    for value in (1.0, float("nan"), -2.0):
        ours = rows(low=torch.float16)
        on_gpu(ours, skip=torch.tensor(value))
        assert same_bits(ours, rows(low=torch.float16))
    ours, plain = rows(), rows()
    on_gpu(ours, skip=torch.tensor(0.0))
    reference_adamw_(plain, **HYPER)
    assert same_bits(ours, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_every_size_are_updated_and_rounded_as_by_the_reference(dtype):
    """Subnormal, infinite and undefined ones, and every pattern of the first 16 bits with a tie behind it."""
    patterns = (torch.arange(1 << 16) << 16 | 0x8000 | 0x1000).to(torch.int64)
    p = (
        torch.where(patterns < 1 << 31, patterns, patterns - (1 << 32))
        .to(torch.int32)
        .view(torch.float32)
    )
    g = p.roll(17)

    def make():
        return [
            AdamRow(
                p.clone(),
                g.clone(),
                g.clone() * 0.5,
                g.abs(),
                2,
                torch.zeros(len(p), dtype=dtype),
            )
        ]

    ours, plain = make(), make()
    on_gpu(ours)
    reference_adamw_(plain, **HYPER)
    for x, y in zip(ours[0][:4] + ours[0][5:], plain[0][:4] + plain[0][5:]):
        assert torch.equal(x.isnan(), y.isnan())
        numbers = ~x.isnan()
        whole = torch.int16 if x.element_size() == 2 else torch.int32
        assert torch.equal(x[numbers].view(whole), y[numbers].view(whole))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(grad=torch.zeros(9)), "beside a parameter of 10"),
        (dict(m=torch.zeros(20)[::2]), "not contiguous"),
        (dict(v=torch.zeros(10, dtype=torch.float64)), "float64"),
        (dict(grad=torch.zeros(10, dtype=torch.float64)), "float64"),
        (dict(low=torch.zeros(10)), "float32"),
        (dict(grad=torch.zeros(10, device="meta")), "one device"),
        (dict(step=0), "step 0"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(change, message):
    good = dict(
        p=torch.zeros(10),
        grad=torch.zeros(10),
        m=torch.zeros(10),
        v=torch.zeros(10),
        step=1,
    )
    with pytest.raises(ValueError, match=message):
        on_gpu([AdamRow(**good | change)])


@pytest.fixture
def gpu_rows(monkeypatch):
    """`RowAdamW` launches its updates into the emulator."""
    monkeypatch.setattr(row_adamw, "adamw", adam_kernels.adamw)
    with emulated_gpu() as gpu:
        yield gpu


def test_a_step_of_the_optimizer_is_a_launch_for_each_group(gpu_rows):
    groups = [
        {
            "params": [torch.nn.Parameter(randn(n, n)) for n in (65, 8, 300)],
            "weight_decay": decay,
        }
        for decay in (0.0, 0.1)
    ]
    optimizer = RowAdamW(groups, **HYPER)
    for p in (p for group in groups for p in group["params"]):
        p.grad, p.low = (
            randn(p.numel(), 7),
            torch.zeros(p.numel(), dtype=torch.bfloat16),
        )
    optimizer.step()
    assert gpu_rows.launches == 2 * ["adamw<float, bf16>"]
    assert all(
        torch.equal(p.low, p.detach().bfloat16())
        for group in groups
        for p in group["params"]
    )


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_of_zero_has_the_bits_of_the_reference(gpu_rows, grad):
    spec, given = ParamSpec("w", (192,), Init("ones")), torch.zeros(192, dtype=grad)
    low = torch.zeros(192, dtype=torch.bfloat16)
    leaf = make_leaf(spec, SlotPiece(0, 0, 192, 0, 0, 192), randn(192, 0), given, low)
    inner = ShardOptimizer(default_groups(RowAdamW), [leaf])
    given.copy_(randn(192, 1))
    plain = AdamRow(
        randn(192, 0),
        given,
        torch.zeros(192),
        torch.zeros(192),
        1,
        torch.zeros(192, dtype=torch.bfloat16),
    )
    for step in (1, 2):
        inner.step(0.01, 0.1, 3.0)
        reference_adamw_(
            [plain._replace(step=step)],
            lr=0.01,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.1,
            grad_scale=1 / 3,
        )
    assert (
        torch.equal(leaf.tensor, plain.p)
        and torch.equal(low, plain.low)
        and inner.writes_low(leaf)
    )
    assert {name for name, _ in inner.state_of(leaf)} == {"exp_avg", "exp_avg_sq"}
    inner.set_num_updates(7)
    inner.step(0.01, 0.1, 3.0)
    assert inner._optimizers[0].state[leaf.tensor]["step"] == 8


def test_a_16_bit_gradient_is_read_where_it_is(gpu_rows):
    p, q = torch.nn.Parameter(randn(99, 0)), torch.nn.Parameter(randn(99, 0))
    p.low_grad = randn(99, 1).bfloat16()
    q.grad = p.low_grad.float()
    for parameter in (p, q):
        RowAdamW([parameter], **HYPER).step()
    assert torch.equal(p, q) and gpu_rows.launches == [
        "adamw<bf16, float>",
        "adamw<float, float>",
    ]


def test_a_run_goes_on_from_torchs_state_and_torch_from_ours(gpu_rows):
    def three_steps(p, optimizer):
        for step in range(3):
            p.grad = randn(p.numel(), step + 1)
            optimizer.step()
        return p.detach().clone()

    def resumed(first, second):
        p = torch.nn.Parameter(randn(333, 0))
        optimizer = first([p], **HYPER)
        three_steps(p, optimizer)
        other = second([p], **HYPER)
        other.load_state_dict(optimizer.state_dict())
        return three_steps(p, other)

    fused = lambda p, **options: torch.optim.AdamW(p, fused=True, **options)
    straight = resumed(fused, fused)
    for first, second in ((fused, RowAdamW), (RowAdamW, fused)):
        torch.testing.assert_close(
            resumed(first, second), straight, rtol=1e-6, atol=1e-6
        )


def test_without_memory_nothing_is_launched():
    p = torch.nn.Parameter(torch.empty(7, device="meta"))
    p.grad = torch.empty(7, device="meta")
    optimizer = RowAdamW([p])
    assert row_adamw.has_kernel(optimizer.param_groups)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].is_meta and optimizer.state[p]["step"] == 1
