"""`HalfBlock`: a layer of a hybrid pattern, x + module(norm(x)), whose module mixes tokens or feeds each forward."""

from typing import Any

import torch
from torch import nn

from ...batch.batch import Batch
from ...config.options.model import ModelConfig
from ...models.embedding import rounded, scaled
from ...models.kept_input import input_keeper
from ...models.layer import HiddenDropout, recompute
from ...models.normalization import make_norm
from ...mpu.context import ParallelContext, Recompute


class HalfBlock(nn.Module):
    """x [s(/t), b, h] → the same shape. name: global, of the layer.

    The module is an attribute of the name that it has in a whole block, self_attention or mlp, or else mixer, so that
    its weights have the names that they have there.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        *,
        norm: str,
        place: str,
        module: nn.Module,
    ):
        """norm, place: names of the norm and of the module."""
        super().__init__()
        self.norm_place = norm
        self.place = place
        self.add_module(norm, make_norm(config, f"{name}.{norm}", ctx))
        self.add_module(place, module)
        self.dropout = HiddenDropout(config.hidden_dropout, f"{name}.{place}", ctx)
        self.multiplier = rounded(config.residual_multiplier, ctx.dtype)
        self.keep_input = input_keeper(ctx)
        self.set_recompute(ctx.recompute.granularity)

    @property
    def module(self) -> nn.Module:
        """What the layer computes of the normed input."""
        return self.get_submodule(self.place)

    def set_recompute(self, granularity: str | None) -> None:
        """What backward computes again: None, "selective" or "full"."""
        self.granularity = Recompute(granularity).granularity
        module: Any = self.module
        if hasattr(module, "recompute_core"):
            module.recompute_core = granularity == "selective"

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the layer, in training with its recomputation."""
        if self.granularity == "full":
            return recompute(self.run, x, batch, keep=self.keep_input)
        return self.run(x, batch)

    def run(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the layer: the norm, the module, dropout and the sum."""
        normed = self.get_submodule(self.norm_place)(x)
        out = scaled(self.module(normed, batch), self.multiplier)
        return self.dropout.add(out, x, batch)
