"""The FLOPs profiler for any module: closed forms, DeepSpeed's own profiler where it counts the same, and texts."""

import re

import pytest
import torch
from torch import nn

from megatron_ds.compat.engine import initialize, module_profiler
from megatron_ds.compat.engine.json_settings import read_settings
from megatron_ds.compat.engine.module_profiler import (
    ModuleProfiler,
    get_model_profile,
)
from megatron_ds.errors import ConfigError

pytestmark = pytest.mark.plan

NUMBERS = (0, 1, 0.9996, 999, 1000, 1234, 5.5e5, 1e6, 2.345e9, 7e12, 3e-3, 4.2e-6)
TEXTS = (
    "number_to_string",
    "flops_to_string",
    "macs_to_string",
    "params_to_string",
    "bytes_to_string",
    "duration_to_string",
)


class Attention(nn.Module):
    """Self-attention of `heads` heads, and a product that is called twice."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        samples, length, width = x.shape
        split = self.qkv(x).view(samples, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(self.out(mixed.transpose(1, 2).reshape(x.shape)))


def model():
    return nn.Sequential(nn.Linear(8, 16), Attention(), nn.Sequential(nn.GELU()))


def products(samples=3, length=5):
    """FLOPs of its parts, by hand."""
    tokens = samples * length
    return {
        "0": 2 * tokens * 8 * 16,
        "1.qkv": 2 * tokens * 16 * 48,
        "1.out": 2 * (2 * tokens * 16 * 16),
        "1": 2 * tokens * 16 * (48 + 2 * 16) + 4 * samples * length * length * 16,
        "2": 0,
    }


def profiled(module, *inputs, **options):
    profiler = ModuleProfiler(module)
    profiler.start_profile(**options)
    module(*inputs)
    profiler.stop_profile()
    return profiler


@pytest.mark.parametrize("grad", [True, False])
def test_each_module_has_its_products_and_those_of_its_parts(grad):
    with torch.set_grad_enabled(grad):
        profiler = profiled(model(), torch.randn(3, 5, 8))
    found = {cost.name: cost for cost in profiler._costs.values()}
    for name, flops in products().items():
        assert found[name].flops == flops, name
    assert profiler.get_total_flops() == products()["0"] + products()["1"]
    assert profiler.get_total_macs() * 2 == profiler.get_total_flops()
    assert found["1.out"].calls == 2 and found["1"].calls == 1
    assert found["1"].seconds >= found["1.out"].seconds > 0
    assert profiler.get_total_duration() >= found["1"].seconds


def test_convolutions_count():
    convolution = nn.Conv2d(3, 4, kernel_size=3, padding=1)
    flops, macs, params = get_model_profile(
        convolution, (2, 3, 6, 6), print_profile=False, as_string=False
    )
    assert flops == 2 * macs == 2 * (2 * 6 * 6 * 4) * (3 * 3 * 3)
    assert params == 4 * 3 * 9 + 4


def test_modules_that_are_ignored_count_nowhere():
    profiler = profiled(model(), torch.randn(3, 5, 8), ignore_list=[Attention])
    assert profiler.get_total_flops() == products()["0"]


def test_a_second_profile_begins_at_zero_and_the_hooks_are_gone():
    module = model()
    profiler = profiled(module, torch.randn(3, 5, 8))
    first = profiler.get_total_flops()
    module(torch.randn(3, 5, 8))
    assert profiler.get_total_flops() == first
    profiler.start_profile()
    module(torch.randn(3, 5, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == first
    profiler.end_profile()
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in module.modules()]
    assert not any(hooks) and not profiler.started


def test_a_forward_that_raises_leaves_the_others_right():
    module = model()
    profiler = ModuleProfiler(module)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        module[1](torch.randn(3, 5, 7))
    module(torch.randn(3, 5, 8))
    profiler.stop_profile()
    assert profiler.get_total_flops() == products()["0"] + products()["1"]


def test_linear_layers_count_as_in_deepspeed():
    theirs = pytest.importorskip("deepspeed.profiling.flops_profiler.profiler")
    layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    options = dict(print_profile=False, as_string=False)
    expected = theirs.get_model_profile(layers, (5, 8), **options)
    assert get_model_profile(layers, (5, 8), **options) == expected
    named = get_model_profile(layers, kwargs={"input": torch.randn(5, 8)}, **options)
    assert named == expected


@pytest.mark.parametrize("name", TEXTS)
def test_numbers_are_written_as_in_deepspeed(name):
    theirs = pytest.importorskip("deepspeed.profiling.flops_profiler.profiler")
    ours = getattr(module_profiler, name)
    for number in NUMBERS:
        assert ours(number) == getattr(theirs, name)(number), number
    assert ours(2.5e6, units="K") == getattr(theirs, name)(2.5e6, units="K")
    assert ours(1.23456e6, precision=4) == getattr(theirs, name)(1.23456e6, precision=4)


def test_the_report_has_sums_the_costliest_and_the_tree(tmp_path):
    path = tmp_path / "profile.txt"
    get_model_profile(model(), (3, 5, 8), output_file=str(path), top_modules=1)
    text = path.read_text()
    assert "MACs        Attention" in text
    assert "(qkv): Linear" in text and "= 100.0 % MACs" in text


def test_a_model_without_input_is_an_error():
    with pytest.raises(ValueError, match="Give input_shape, or args or kwargs"):
        get_model_profile(model())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_profiles_the_forward_that_its_json_asks_for(stage, tmp_path):
    path = tmp_path / "profile.txt"
    block = {"enabled": True, "profile_step": 1, "output_file": str(path)}
    module = model()
    engine, *_ = initialize(
        model=module,
        model_parameters=module.parameters(),
        config={
            "train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "flops_profiler": block,
        },
    )
    written = []
    for _ in range(6):
        engine.backward(engine(torch.randn(3, 5, 8)).square().mean())
        engine.step()
        written.append(path.exists())
        path.unlink(missing_ok=True)
    # the first micro-batch behind one update of two
    assert written == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    "block, message",
    [
        ({"enable": True}, 'unknown key "flops_profiler.enable"'),
        ({"profile_step": True}, '"flops_profiler.profile_step" is true'),
        ({"top_modules": "3"}, '"flops_profiler.top_modules" is'),
        ([], '"flops_profiler" is'),
    ],
)
def test_a_wrong_block_is_an_error(block, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_settings({"train_batch_size": 1, "flops_profiler": block}, 1)
