"""`GatedDeltaNet`: linear attention whose state forgets, and corrects what it returns for a key (Yang et al. 2024,
arXiv:2412.06464, section 3), as Qwen3-Next has it.

    β = σ(b) (or 2 σ(b)),   g = -exp(A_log) softplus(a + dt_bias),   q and k of length 1, q divided by √dk
    y = RMSNorm(o) · silu(z), with one weight for the channels of all heads
"""

import torch
import torch.nn.functional as F

from ...config.options.model import ModelConfig
from ...mpu.context import ParallelContext
from ...mpu.param_spec import Init
from .scan_mixer import MixerSizes, Scan, ScanMixer

EPS = 1e-6  # added to squares of lengths, as published models have it


def delta_sizes(config: ModelConfig) -> MixerSizes:
    """Return the sizes of gated delta nets of a model."""
    keys = config.linear_num_key_heads
    heads = config.linear_num_value_heads // keys
    dk = config.linear_key_head_dim
    dv = config.linear_value_head_dim
    return MixerSizes(
        groups=keys,
        heads=heads,
        key_dim=dk,
        value_dim=dv,
        channels=(dk, dk, heads * dv),  # q, k, v
        gates=2,  # b, a
        taps=config.linear_conv_kernel_dim,
        has_rule=True,
    )


class GatedDeltaNet(ScanMixer):
    """x [s(/t), b, h] → the same shape. A group is a key head with its value heads: rows z.., q, k, v.., b.., a.."""

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, *, output_std: float
    ):
        epsilon = config.linear_norm_epsilon
        self.largest_beta = 2.0 if config.linear_negative_eigenvalues else 1.0
        super().__init__(
            config,
            name,
            ctx,
            delta_sizes(config),
            noun="linear_num_key_heads",
            conv_bias=False,
            output_std=output_std,
        )
        self.eps = config.norm_epsilon if epsilon is None else epsilon

    def make_norm(self) -> None:
        """Make the weights of the norm; heads of all ranks share them."""
        self.norm_weight = self.parameter(
            "norm.weight",
            (self.sizes.value_dim,),
            Init("ones"),
            splits=(),
            partial_over=("tp",),
        )

    def scanned(
        self,
        parts: tuple[torch.Tensor, ...],
        gates: list[torch.Tensor],
        groups: range,
        scan: Scan,
    ) -> torch.Tensor:
        """Return o [s, b, heads, dv] in the dtype of the values."""
        q, k, v = parts
        b, a = gates
        return scan(
            _unit(q) * self.sizes.key_dim**-0.5,
            _unit(k),
            v.unflatten(-1, (self.sizes.heads, -1)).flatten(2, 3),
            self.decay(self.steps(a, groups), groups),
            self.largest_beta * b.float().sigmoid(),
        )

    def gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return norm(out) · silu(z), fp32."""
        weight = self.norm_weight.float()
        normed = F.rms_norm(out.float(), weight.shape, weight, self.eps)
        return normed * F.silu(z.float())


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return x [.., d] in fp32, divided by its length."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
