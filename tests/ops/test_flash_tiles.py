"""FlashAttention on tiles, on a GPU that does not exist: the numbers of torch's fused attention of CPUs, keys that
are not repeated, and what happens where the kernel is wrong or a newer one is installed."""

import importlib.machinery
from collections import Counter

import pytest
import torch

from megatron_ds.extensions.kernels.gpu import flash_tiles
from megatron_ds.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron_ds.ops.attention_tiles import Runs
from megatron_ds.ops.key_visibility import KeyVisibility
from megatron_ds.ops.partial_attention import PartialAttention, PartialGradients
from tests.harness import cuda_attention
from tests.harness.fake_cuda import FakeGpu, fake_cuda

pytestmark = pytest.mark.plan

SIZE, SAMPLES, HEADS, GROUPS, CHANNELS = 32, 2, 4, 2, 16
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention


@pytest.fixture(autouse=True)
def forgotten():
    """Each test checks the kernel itself."""
    yield
    flash_tiles.reason_against.cache_clear()
    flash_tiles.activate_newer_kernels.cache_clear()


def tensors(heads):
    draw = torch.Generator().manual_seed(heads)
    shape = SIZE, SAMPLES, heads, CHANNELS
    return torch.randn(shape, generator=draw).bfloat16()


def ring(pattern, device):
    """Output and gradients of the later half of a sequence, whose keys are in two blocks."""
    q, k, v = tensors(HEADS), tensors(GROUPS), tensors(GROUPS) + 1
    q, k, v = (t.to(device) for t in (q, k, v))
    dout = tensors(HEADS).flatten(2).to(device)
    places = Runs((range(SIZE, 2 * SIZE),))
    blocks = [(places, k, v), (Runs((range(SIZE),)), k + 1, v - 1)]
    visible = KeyVisibility(pattern)
    partial = PartialAttention(q, places, visible)
    for positions, keys, values in blocks:
        partial.add(keys, values, positions)
    result = partial.result()
    gradients = PartialGradients(q, places, visible, partial.work.scoring, result, dout)
    found = [result[0]]
    for positions, keys, values in blocks:
        dkv = torch.zeros(2, *keys.shape, device=device)
        gradients.add(keys, values, positions, dkv)
        found.append(dkv)
    return [t.cpu().float() for t in (*found, gradients.dq)]


def called(monkeypatch, packets):
    """Counts the calls of operations of aten on the fake GPU."""
    counts = Counter()
    for packet in packets:
        function = cuda_attention.IN_PLACE_OF[packet]

        def counted(*arguments, packet=packet, function=function, **options):
            counts[packet] += 1
            return function(*arguments, **options)

        monkeypatch.setitem(cuda_attention.IN_PLACE_OF, packet, counted)
    return counts


def on_a_gpu(pattern=CAUSAL):
    with fake_cuda(), FakeGpu() as gpu:
        found = ring(pattern, torch.device("cuda", 0))
    assert not gpu.order.problems
    return found, [what for _, what in gpu.order.launches]


def test_tiles_without_a_bias_run_flash_attention(monkeypatch):
    counts = called(monkeypatch, [FLASH, FLASH_BACKWARD, EFFICIENT])
    found, launches = on_a_gpu()
    assert counts[FLASH] == counts[FLASH_BACKWARD] == 2 + 2  # two of them are the check
    assert not counts[EFFICIENT]
    # the heads of keys are repeated only where the check writes attention out
    assert launches.count("aten.repeat_interleave") <= 2
    for got, expected in zip(found, ring(CAUSAL, "cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_tiles_with_a_bias_run_the_memory_efficient_kernel(monkeypatch):
    counts = called(monkeypatch, [FLASH, EFFICIENT])
    window = AttentionPattern(left=20)
    found, _ = on_a_gpu(window)
    assert counts[EFFICIENT] and not counts[FLASH]
    for got, expected in zip(found, ring(window, "cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packet", [FLASH, FLASH_BACKWARD], ids=str)
def test_a_kernel_that_computes_something_else_is_not_used(packet, monkeypatch, caplog):
    function = cuda_attention.IN_PLACE_OF[packet]

    def wrong(*arguments, **options):
        return function(*arguments, **options | {"scale": 0.3})

    monkeypatch.setitem(cuda_attention.IN_PLACE_OF, packet, wrong)
    found, _ = on_a_gpu()
    assert "FlashAttention failed the check for torch.bfloat16" in caplog.text
    for got, expected in zip(found, ring(CAUSAL, "cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.fixture
def installed(monkeypatch):
    """FlashAttention 4 and 3 are installed, but torch cannot use 4; the names that torch was given."""
    asked = []

    def activate(name):
        asked.append(name)
        if name == "FA4":
            raise ImportError("another version is needed")

    spec = importlib.machinery.ModuleSpec("some_module", None)
    monkeypatch.setattr(flash_tiles, "find_spec", lambda name: spec)
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    restore = lambda: asked.append("torch's own")
    monkeypatch.setattr(attention, "restore_flash_attention_impl", restore)
    return asked


def test_the_newest_flash_attention_that_runs_is_activated(installed, caplog):
    on_a_gpu()
    assert installed == ["FA4", "FA3"]
    assert "FA4 is installed, but torch cannot use it: another version" in caplog.text


def test_a_newer_kernel_that_is_wrong_gives_way_to_torchs(installed, monkeypatch):
    function = cuda_attention.IN_PLACE_OF[FLASH]

    def wrong_until_restored(*arguments, **options):
        is_own = installed[-1:] == ["torch's own"]
        return function(*arguments, **options if is_own else options | {"scale": 0.3})

    monkeypatch.setitem(cuda_attention.IN_PLACE_OF, FLASH, wrong_until_restored)
    counts = called(monkeypatch, [EFFICIENT])
    on_a_gpu()
    assert installed == ["FA4", "FA3", "torch's own"]
    assert not counts[EFFICIENT]
