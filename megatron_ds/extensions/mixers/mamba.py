"""`Mamba`: Mamba-2, a state space model in its dual form (Dao and Gu 2024, arXiv:2405.21060, section 7).

Δ = softplus(dt + dt_bias),   S ← exp(-exp(A_log) Δ) S + Δ B xᵀ,   y = Sᵀ C + D x
y = RMSNorm(y · silu(z)), over the channels of a group; RMSNorm(y) · silu(z), or y · silu(z)
"""

import torch
import torch.nn.functional as F

from ...config.options.model import ModelConfig
from ...mpu.context import ParallelContext
from ...mpu.param_spec import Init
from .scan_mixer import MixerSizes, Scan, ScanMixer


def mamba_sizes(config: ModelConfig) -> MixerSizes:
    """Return the sizes of the Mamba-2 layers of a model."""
    groups = config.mamba_num_groups
    heads = config.mamba_heads // groups
    dk = config.mamba_state_dim
    dv = config.mamba_head_dim
    return MixerSizes(
        groups=groups,
        heads=heads,
        key_dim=dk,
        value_dim=dv,
        channels=(heads * dv, dk, dk),  # x, B, C
        gates=1,  # dt
        taps=config.mamba_conv_kernel_dim,
    )


class Mamba(ScanMixer):
    """x [s(/t), b, h] → the same shape. A group has the rows z.., x.., B, C, dt.. of its heads."""

    def __init__(
        self, config: ModelConfig, name: str, ctx: ParallelContext, *, output_std: float
    ):
        self.least_step = config.mamba_least_step
        self.norm = config.mamba_norm
        self.factors: tuple[float, ...] = ()
        super().__init__(
            config,
            name,
            ctx,
            mamba_sizes(config),
            noun="mamba_num_groups",
            conv_bias=True,
            output_std=output_std,
        )

    def make_norm(self) -> None:
        """Make the weights of the sum and of the norm."""
        sizes = self.sizes
        heads = sizes.groups * sizes.heads
        self.D = self.parameter("D", (heads,), Init("ones"), dtype=torch.float32)
        if self.norm != "none":
            self.norm_weight = self.parameter(
                "norm.weight", (sizes.groups * sizes.width,), Init("ones")
            )

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the parts of each group, [s, b, g, parts], times their factors."""
        parts = super().projected(x)
        if not self.factors:
            return parts
        rows = zip(self.sizes.parts, self.factors, strict=True)
        factors = torch.cat([parts.new_full((n,), factor) for n, factor in rows])
        return parts * factors

    def scanned(
        self,
        parts: tuple[torch.Tensor, ...],
        gates: list[torch.Tensor],
        groups: range,
        scan: Scan,
    ) -> torch.Tensor:
        """Return y [s, b, heads, dv] in the dtype of x."""
        x, keys, queries = parts
        (gate,) = gates
        steps = self.steps(gate, groups)
        if self.least_step:
            steps = steps.clamp(min=self.least_step)
        values = x.unflatten(-1, (self.sizes.heads, -1)).flatten(2, 3).float()
        y = scan(
            queries,
            keys,
            values * steps[..., None],
            self.decay(steps, groups),
            None,
        )
        return (y + self.of_heads(self.D, groups)[:, None] * values).to(x.dtype)

    def gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return norm(out · silu(z)) or, by --mamba-norm, norm(out) · silu(z) or out · silu(z), fp32."""
        gate = F.silu(z.float())
        if self.norm == "none":
            return out.float() * gate
        if self.norm == "before_gate":
            return self._normed(out.float()) * gate
        return self._normed(out.float() * gate)

    def _normed(self, gated: torch.Tensor) -> torch.Tensor:
        """Return the norm of the channels of each group, of [s, b, n, dv]."""
        heads = gated.shape[2:]
        width = self.sizes.width
        of_groups = gated.flatten(2).unflatten(-1, (self.groups, width))
        normed = F.rms_norm(of_groups, (width,), None, self.eps)
        weight = self.norm_weight.float().unflatten(0, (self.groups, width))
        return (normed * weight).flatten(2).unflatten(-1, heads)
