"""Weights of linear layers in 8 or 4 bits, which each product turns back into numbers.

A number differs from its code times the scale by at most half a scale: amax / 254 of its group in 8 bits
(Dettmers et al. 2022, arXiv:2110.02861, section 2.1; ops/quantize.py).
"""

from functools import cache

import torch
from torch import nn

from ...errors import ConfigError
from ...ops.quantize import dequantize, quantize
from ..division.split_plan import is_linear
from .settings import NEIGHBOURS, StoredFormat


class StoredWeight:
    """A `weight` that is computed from codes and scales at each use. It is the first base of the class of a linear
    layer."""

    codes: torch.Tensor
    scales: torch.Tensor
    stored: tuple[torch.Size, torch.dtype, int, int]

    @property
    def weight(self) -> torch.Tensor:
        """The weight, in the number format of the model; new memory in each call."""
        shape, dtype, bits, block = self.stored
        numbers = dequantize(
            self.scales.float(), self.codes, shape.numel(), bits, block, dtype
        )
        return numbers.view(shape)


def store(model: nn.Module, form: StoredFormat) -> int:
    """Store the weights of linear layers, in place; returns how many. Embeddings and output layers stay."""
    heads = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)
    } | {id(getattr(heads, "weight", None))}
    # A weight that two modules share would lose its link.
    linears = [
        (name, m)
        for name, m in model.named_modules()
        if is_linear(m) and id(m.weight) not in embeddings
    ]
    for name, linear in linears:
        _store_one(name, linear, form)
    return len(linears)


def _store_one(name: str, linear: nn.Module, form: StoredFormat) -> None:
    weight = linear.get_parameter("weight").detach()
    block = NEIGHBOURS
    if form.groups is not None:
        block, rest = divmod(weight.numel(), form.groups)
        if rest or block % 2:
            raise ConfigError(
                f"{name} has {weight.numel()} numbers on each rank, which do not make {form.groups} groups of an "
                f'even size. Give another "quant.weight.q_groups", or leave it out for groups of {NEIGHBOURS}.'
            )
    codes, scales = quantize(weight.contiguous(), form.bits, block)
    del linear.weight
    kind: type = type(linear)
    linear.__class__ = _stored_class(kind)
    assert isinstance(linear, StoredWeight)
    linear.stored = (weight.shape, weight.dtype, form.bits, block)
    linear.register_buffer("codes", codes)
    linear.register_buffer("scales", scales)


@cache
def _stored_class(kind: type) -> type:
    """Make the class of a linear layer with `StoredWeight.weight` in place of the parameter."""
    return type(f"Stored{kind.__name__}", (StoredWeight, kind), {})
