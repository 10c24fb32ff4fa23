"""Functions of a block that are joined compute what its layers compute one by one, to the bit."""

import copy

import pytest
import torch

from megatron_ds.extensions.joined_blocks import joined_block
from megatron_ds.extensions.joined_blocks.joined_run import JoinedRun
from megatron_ds.models.attention import CoreAttention
from megatron_ds.mpu.managed_parameter import accumulator_of
from megatron_ds.ops.norms import LayerNorm
from tests.harness.host_blocks import gpu_path, own_blocks, torch_path

pytestmark = pytest.mark.plan

STEPS = 2


class Runs:
    """Blocks with what goes through them."""

    def __init__(self, style: str, dtype: str, more: str = ""):
        torch.manual_seed(5)
        self.run = own_blocks(style, 2, dtype, more)
        self.x = torch.randn_like(self.run.x)
        self.dy = torch.randn_like(self.run.x)

    @property
    def parameters(self):
        return [p for m in self.run.stage.modules for p in m.parameters()]

    def results(self, microbatches: int = STEPS) -> list[torch.Tensor]:
        """Outputs, gradients of inputs, and those of parameters after so many micro-batches."""
        stage = self.run.stage
        found = []
        for _ in range(microbatches):
            y = stage.forward(0, self.run.batch, self.x, 1.0)
            found += [y, stage.backward(0, self.dy).clone()]
        return found + [accumulator_of(p).view().clone() for p in self.parameters]


@pytest.fixture
def joined(monkeypatch):
    """How often functions were joined."""
    found = []
    functions = JoinedRun.functions

    def noted(self, *arguments):
        block = functions(self, *arguments)
        found.append(block is not None)
        return block

    monkeypatch.setattr(JoinedRun, "functions", noted)
    return found


def one_by_one(monkeypatch, *what):
    with monkeypatch.context() as patch:
        patch.setattr(JoinedRun, "functions", lambda self, *arguments: None)
        return Runs(*what).results()


def check_equal(found, expected):
    assert len(found) == len(expected) > STEPS
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "more", ["", "--kernels torch", "--recompute-granularity full"]
)
def test_bits_are_those_of_the_layers(dtype, more, joined, monkeypatch):
    check_equal(
        Runs("gpt", dtype, more).results(),
        one_by_one(monkeypatch, "gpt", dtype, more),
    )
    assert joined and all(joined)


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_kernels_of_a_gpu_are_joined(style, joined):
    with gpu_path():
        Runs(style, "bf16").results()
    assert joined and all(joined)


def test_a_block_is_two_functions_and_its_attention():
    with torch_path():
        runs = Runs("gpt", "bf16", "--kernels torch")
        y = runs.run.stage.modules[0](runs.x.requires_grad_(), runs.run.batch)
    assert y.grad_fn.name() == "AfterAttentionBackward"


def test_hooks_see_the_outputs_of_layers(joined):
    runs = Runs("gpt", "fp32")
    before = runs.results()
    seen = []
    mlp = runs.run.stage.modules[0].mlp
    for module in (mlp, mlp.linear_fc1):
        module.register_forward_hook(lambda module, inputs, y: seen.append(y.shape[-1]))
    del joined[:]
    after = runs.results(1)
    assert seen == [64, 16] and joined == [False, True]
    assert torch.equal(after[0], before[0])


def test_hooks_of_all_modules_see_the_layers(joined):
    runs = Runs("gpt", "fp32")
    runs.results(1)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        runs.results(1)
    finally:
        hook.remove()
    assert joined == [True, True, False, False]


def test_layers_that_are_replaced_compute(joined):
    """A layer, and a parameter: the functions that were joined before have the old ones."""
    runs = Runs("gpt", "fp32")
    block = runs.run.stage.modules[0]
    results = lambda: block(runs.x.requires_grad_(), runs.run.batch)
    old = results()
    fc1 = block.mlp.linear_fc1
    block.mlp.linear_fc1 = AddsOne(fc1)
    assert not torch.equal(results(), old)
    block.mlp.linear_fc1 = fc1
    assert torch.equal(results(), old)
    weight = fc1.weight
    fc1.weight = torch.nn.Parameter(torch.zeros_like(weight))
    assert not torch.equal(results(), old)
    fc1.weight = weight
    assert torch.equal(results(), old)
    assert joined == [True, False, True, False, True]


def bare_norm(block):
    block.input_layernorm = torch.nn.Identity()


def other_class_of_norm(block):
    norm = DoubledNorm(len(block.pre_mlp_layernorm.weight), name="norm")
    norm._parameters = block.pre_mlp_layernorm._parameters
    block.pre_mlp_layernorm = norm


def other_activation(block):
    block.mlp.activation = torch.relu


def other_eps(block):
    block.input_layernorm.eps = block.pre_mlp_layernorm.eps = 0.5


def own_forward(block):
    forward = block.mlp.linear_fc2.forward
    block.mlp.linear_fc2.forward = lambda x: forward(x) * 2


CHANGES = (bare_norm, other_class_of_norm, other_activation, other_eps, own_forward)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_layer_counts_from_the_next_forward(change, monkeypatch):
    runs = Runs("gpt", "fp32")
    block = runs.run.stage.modules[0]
    results = lambda: block(runs.x.requires_grad_(), runs.run.batch)
    old = results()
    change(block)
    found = results()
    monkeypatch.setattr(JoinedRun, "functions", lambda self, *arguments: None)
    assert torch.equal(found, results()) and not torch.equal(found, old)


class DoubledNorm(LayerNorm):
    """A norm of another kind."""

    def forward(self, x, residual=None):
        found = super().forward(x, residual)
        return found * 2 if residual is None else (found[0] * 2, found[1])


@pytest.mark.parametrize("first", [True, False])
def test_parameters_that_zero_does_not_manage_receive_gradients(first, joined):
    """Neither before a replica takes the module, nor after it is destroyed."""
    runs = Runs("gpt", "fp32")
    block = runs.run.stage.modules[0]
    parameters = list(block.parameters())
    accumulators = [accumulator_of(p) for p in parameters]
    if first:
        runs.results(1)
    for p in parameters:
        del p.gradient_sum
    for hook in runs.run.replica.optimizer.trained[0].buckets.hooks:
        hook.remove()
    del joined[:]
    for _ in range(2):
        x = runs.x.clone().requires_grad_()
        block(x, runs.run.batch).backward(runs.dy)
    assert joined == [False, False]
    assert all(p.grad is not None and p.grad.any() for p in parameters)
    for p, accumulator in zip(parameters, accumulators):
        p.gradient_sum = accumulator
    block(x, runs.run.batch)
    assert joined[-1]


def test_a_core_may_return_a_part_of_its_memory(joined, monkeypatch):
    def parted(core, *arguments):
        y = forward(core, *arguments)
        return torch.cat([y, y], -1)[..., : y.shape[-1]]

    forward = CoreAttention.forward
    monkeypatch.setattr(CoreAttention, "forward", parted)
    seen = []
    rows = joined_block.row_rows
    note = lambda x, *others: seen.append(x.is_contiguous()) or rows(x, *others)
    monkeypatch.setattr(joined_block, "row_rows", note)
    check_equal(Runs("gpt", "fp32").results(), one_by_one(monkeypatch, "gpt", "fp32"))
    assert all(joined) and seen and all(seen)


class AddsOne(torch.nn.Module):
    """A linear layer of another kind."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def test_autocast_casts_each_layer(joined):
    runs = Runs("gpt", "fp32")
    block = runs.run.stage.modules[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block(runs.x.requires_grad_(), runs.run.batch)
    assert joined == [False]


def test_a_graph_that_is_retained_is_followed_twice():
    runs = Runs("gpt", "fp32")
    x = runs.x.requires_grad_()
    y = runs.run.stage.modules[0](x, runs.run.batch).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_a_frozen_layer_gets_no_gradient(joined):
    runs = Runs("gpt", "fp32")
    norm = runs.run.stage.modules[1].pre_mlp_layernorm
    norm.requires_grad_(False)
    runs.results(1)
    assert joined == [True, False]
    received = {p for p in runs.parameters if accumulator_of(p).view().any()}
    assert received == {*runs.parameters} - {*norm.parameters()}


def test_a_copy_joins_its_own_layers():
    runs = Runs("gpt", "fp32")
    runs.results(1)
    block = runs.run.stage.modules[0]
    again = copy.deepcopy(block)
    x = runs.x.clone().requires_grad_()
    y = again(x, runs.run.batch)
    y.backward(runs.dy)
    assert torch.equal(y, block(runs.x, runs.run.batch))
    assert all(p.grad is not None for p in again.parameters())
