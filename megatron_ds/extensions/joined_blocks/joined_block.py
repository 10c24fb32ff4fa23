"""The functions of a block before and after its attention, each joined to one function of autograd.

    before   x → norm → linear_qkv
    after    attended → linear_proj → + x, norm → linear_fc1 → activation → linear_fc2 → + sum

A function of autograd that is written in Python takes the host about 10 µs, and views between functions as much. For
a small block that is more than a GPU takes. The two functions compute what the layers compute one by one, in the same
order, and keep the same tensors.
"""

from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import Function

from ...host.autograd_functions import Halves, differentiable_once, direct_apply
from ...models.attention import SelfAttention
from ...models.block import MLP, Block
from ...ops.kernel_table import CHOICES, Bound
from ...ops.linear_products import UNBOUND, LinearProducts
from ...ops.norms import NORMS
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearCall,
    Parameters,
    RowParallelLinear,
    column_gradients,
    column_rows,
    row_gradients,
    row_rows,
)
from ...tensor_parallel.weight_grad import ADDS, add_gradient

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
_REQUIRES_GRAD = attrgetter("requires_grad")
# Second arguments of `map`.
_ADDS = repeat(ADDS)
_FORWARD = repeat("forward")
Linear = tuple[Parameters, LinearCall, LinearProducts]


class JoinedNorm(NamedTuple):
    """A norm: the functions that compute it, its parameters, and the module, which has its `eps`."""

    halves: Halves
    parameters: Parameters
    module: nn.Module

    def add_gradients(self, dw: torch.Tensor, db: torch.Tensor | None) -> None:
        """Add the gradients of the parameters."""
        weight, bias = self.parameters
        add_gradient(weight, dw)
        if bias is not None:
            add_gradient(bias, db)


class JoinedBlock(NamedTuple):
    """The layers of a block for inputs of one shape."""

    norm_before: JoinedNorm
    qkv: Linear
    proj: Linear
    norm_after: JoinedNorm
    fc1: Linear
    activation: Halves
    fc2: Linear

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """x [s(/t), b, h] → queries, keys and values [s, b, (n + 2g)/t * d]."""
        return _before(x, self)

    def after(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """attended [s, b, n/t * d] and the input x of the block → its output, like x."""
        return _after(attended, x, self)


class JoinedLayers(NamedTuple):
    """The modules of a block that could be joined. around: those that they are in"""

    norm_before: nn.Module
    qkv: nn.Module
    proj: nn.Module
    norm_after: nn.Module
    fc1: nn.Module
    fc2: nn.Module
    activation: object
    around: tuple[nn.Module, ...]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules."""
        return [*self[:6], *self.around]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters."""
        return [p for layer in self[:6] for p in layer.parameters()]

    def joined(self, x: torch.Tensor) -> JoinedBlock | None:
        """The layers for inputs like x. None with an adapter, or another layer of any kind; where autograd
        accumulates a gradient, since ZeRO does not manage the parameter; and where an implementation has no halves.
        """
        columns = type(self.qkv), type(self.fc1)
        rows = type(self.proj), type(self.fc2)
        if {*columns} != {ColumnParallelLinear} or {*rows} != {RowParallelLinear}:
            return None
        norms = {type(self.norm_before), type(self.norm_after)}
        if not norms <= {*NORMS.values()}:
            return None
        if not all(map(hasattr, self.parameters, _ADDS)):
            return None
        if not isinstance(self.activation, Bound):
            return None
        # What computes norms and activation.
        first = self.norm_before.halves(x, adds=False)
        second = self.norm_after.halves(x, adds=True)
        wide = x.new_empty(*x.shape[:-1], len(self.fc1.weight))
        activation = getattr(self.activation.chosen(wide), "halves", None)
        if None in (first, second, activation):
            return None
        return JoinedBlock(
            _norm(self.norm_before, first),
            _linear(self.qkv),
            _linear(self.proj),
            _norm(self.norm_after, second),
            _linear(self.fc1),
            activation,
            _linear(self.fc2),
        )


def _norm(norm: nn.Module, halves: Halves) -> JoinedNorm:
    return JoinedNorm(halves, tuple(norm._parameters.values()), norm)


def _linear(layer: nn.Module) -> Linear:
    # Rows are as many in each call: the products need no key.
    products = LinearProducts() if CHOICES.number is not None else UNBOUND
    return tuple(layer._parameters.values()), layer.call, products


def _layers_of(block: Block) -> JoinedLayers | None:
    """None in blocks of other forms."""
    mlp = block.mlp
    attention = block.self_attention
    if block.norms_outputs or type(mlp) is not MLP or mlp.tiles > 1:
        return None
    if type(attention) is not SelfAttention:
        return None
    return JoinedLayers(
        block.input_layernorm,
        attention.linear_qkv,
        attention.linear_proj,
        block.pre_mlp_layernorm,
        mlp.linear_fc1,
        mlp.linear_fc2,
        mlp.activation,
        (attention, mlp),
    )


class Join:
    """The joined functions of one block. They are joined again when its inputs have another shape, when a layer, a
    parameter or the activation is replaced, and when ZeRO begins or ceases to manage the parameters."""

    def __init__(self):
        self._key: tuple | None = None
        self._joined: JoinedBlock | None = None
        self._hooks: list[dict] = []
        # Attributes of the modules; a `forward` among them takes the place of that of the class.
        self._attributes: list[dict] = []
        self._parameters: list[torch.Tensor] = []
        # Members of modules, and what they were when the functions were joined.
        self._members: list[dict] = []
        self._known: list[object] = []

    def __deepcopy__(self, memo: dict) -> "Join":
        return Join()

    def __call__(self, block: Block, x: torch.Tensor) -> JoinedBlock | None:
        """The joined functions of the block for x. None where its layers run one by one: outside of training, with
        hooks on them or a `forward` of their own, under torch's autocast, and where parameters are frozen."""
        # A plan computes on the meta device, layer by layer.
        if torch.compiler.is_dynamo_compiling() or x.is_meta or not x.requires_grad:
            return None
        # In most calls all of this is as in the last call.
        activation = vars(block._modules["mlp"]).get("activation")
        is_managed = all(map(hasattr, self._parameters, _ADDS))
        key = x.shape, x.dtype, CHOICES.number, activation, is_managed
        is_known = key == self._key and key[2] is not None
        members = chain.from_iterable(map(dict.values, self._members))
        if not is_known or not all(map(is_, members, self._known)):
            self._find(x, block)
            self._key = key
        if self._joined is None or not torch.is_grad_enabled() or any(self._hooks):
            return None
        if any(map(contains, self._attributes, _FORWARD)):
            return None
        if torch.is_autocast_enabled(x.device.type):
            return None
        is_trained = all(map(_REQUIRES_GRAD, self._parameters))
        return self._joined if is_trained else None

    def _find(self, x: torch.Tensor, block: Block) -> None:
        self._joined = None
        layers = _layers_of(block)
        self._members = [block._modules]
        if layers is not None and type(x) is torch.Tensor:
            self._joined = layers.joined(x)
            self._parameters = layers.parameters
            self._members += (m._modules for m in layers.around)
            self._members += (layer._parameters for layer in layers.modules)
            own = [getattr(m, name) for m in layers.modules for name in HOOKS]
            self._hooks = [*own, *HOOKS_OF_ALL]
            self._attributes = [vars(m) for m in layers.modules]
        self._known = [value for each in self._members for value in each.values()]


class BeforeAttention(Function):
    """x [s(/t), b, h] → [s, b, (n + 2g)/t * d] of a `JoinedBlock`."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.shape = x.shape
        (forward, _), parameters, norm = block.norm_before
        samples, width = x.shape[1:]
        normed, *kept = forward(x.reshape(-1, width), None, *parameters, norm.eps)
        qkv = column_rows(normed, *block.qkv)
        ctx.save_for_backward(normed, *kept)
        return qkv.resize_(len(qkv) // samples, samples, qkv.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        normed, *kept = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # each is freed after its step, unless the graph is retained
        norm = ctx.block.norm_before
        dy = dy.reshape(-1, dy.shape[-1])
        dnormed, _, _ = column_gradients(dy, normed, *ctx.block.qkv)
        del normed
        dx, *of_norm = norm.halves.backward(dnormed, None, *kept, norm.parameters)
        norm.add_gradients(*of_norm)
        return dx.view(ctx.shape), None


class AfterAttention(Function):
    """attended [s, b, n/t * d], x [s(/t), b, h] → the output of a `JoinedBlock`, like x."""

    @staticmethod
    def forward(ctx, attended, x, block):
        ctx.block = block
        ctx.shapes = attended.shape, x.shape
        (forward, _), parameters, norm = block.norm_after
        attended = attended.reshape(-1, attended.shape[-1]).contiguous()
        residual = x.reshape(-1, x.shape[-1])
        out = row_rows(attended, *block.proj)
        normed, *kept = forward(out, residual, *parameters, norm.eps)
        total = kept[0]
        # The feed-forward.
        wide = column_rows(normed, *block.fc1)
        active = block.activation.forward(wide)
        out = row_rows(active, *block.fc2)
        ctx.save_for_backward(attended, *kept, normed, wide, active)
        return out.add_(total).resize_(x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        attended, *kept, normed, wide, active = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        block = ctx.block
        norm = block.norm_after
        of_attended, of_x = ctx.shapes
        dy = dy.reshape(-1, dy.shape[-1])
        dactive, _, _ = row_gradients(dy, active, *block.fc2)
        del active
        dwide = block.activation.backward(dactive, wide)
        del dactive, wide
        dnormed, _, _ = column_gradients(dwide, normed, *block.fc1)
        del dwide, normed
        dx, *of_norm = norm.halves.backward(dnormed, dy, *kept, norm.parameters)
        norm.add_gradients(*of_norm)
        dattended, _, _ = row_gradients(dx, attended, *block.proj)
        return dattended.view(of_attended), dx.view(of_x), None


_before = direct_apply(BeforeAttention)
_after = direct_apply(AfterAttention)
