"""`ZeroSettings`: everything that the optimizer must know of the configuration, as one value; and the table
of ZeRO stages.

Rajbhandari et al. 2020 (arXiv:1910.02054), section 5: P_os, P_os+g, P_os+g+p are stages 1, 2 and 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from ..config import RunConfig, ZeroConfig
from ..errors import ConfigError
from ..features import wants_checksums
from ..optim import ParamGroup, param_groups_of
from .exchange import GradientExchange
from .layout import ALIGN
from .loss_scale import LossScale, make_scaler
from .offload_settings import DEVICE, OffloadSettings
from .unused import Rule
from .update_rule import SUMMED, UpdateRule

if TYPE_CHECKING:
    from .number_blocks import Blocks

# All data-parallel ranks; or groups of consecutive ones (data_groups.py).
Axis = Literal["dp", "inner"]
# of codes (Wang et al. 2023, arXiv:2306.10209, section 3)
WEIGHT_BITS = 8
GRADIENT_BITS = 4
FIRST_HOP_BITS = 8  # of gradients inside an inner group, before they leave it
# elements, unless the configuration gives a size
LARGEST_BUCKET = 40_000_000
# Elements, in the largest bucket, for each of many ranks, which send pieces of it.
RANK_PIECE = 1_000_000
SMALLEST_BUCKET = 1_000_000


@dataclass(frozen=True)
class ShardPolicy:
    """The axis over which each kind of state is split; None: every rank holds the whole."""

    optimizer: Axis | None
    gradient: Axis | None
    parameter: Axis | None


STAGES = {
    0: ShardPolicy(None, None, None),
    1: ShardPolicy("dp", None, None),
    2: ShardPolicy("dp", "dp", None),
    3: ShardPolicy("dp", "dp", "dp"),
}
# Stage 3 whose gathers stay inside a node.
HIERARCHICAL = ShardPolicy("dp", "dp", "inner")


@dataclass(frozen=True)
class ZeroSettings:
    """How parameters are updated, split and reduced.

    param_groups     which optimizer updates which parameters (optim/optimizers.py)
    policy           a row of the table of stages
    bucket_elements  of one reduction; None: an eighth of the rank's parameters within limits
    gather_elements  of one all-gather of updated weights, which use the same buckets: a further limit
    overlap          reduce buckets during backward
    grad_dtype       dtype in which gradients accumulate
    sent_dtype       dtype in which they are summed over the ranks; None: grad_dtype
    sent_divisor     they are divided by it before the sum and multiplied after it; None: by the number of
                     ranks
    exchange         makes another `GradientExchange` than the full-precision one
    weight_blocks    stage 3: the format in which weights are gathered; None: their dtype
    gradient_blocks  stages 2 and 3: the format in which gradients are sent; None: sent_dtype. Inside an inner
                     group with FIRST_HOP_BITS
    clip_grad        largest gradient norm; 0: no clipping
    make_scaler      makes the loss scaler
    persistence      stage 3: parameters with fewer elements stay whole; None: the smallest, a thousandth of
                     all
    prefetch         stage 3: elements gathered ahead of the current layer; None: one layer of any size
    offload          where state is kept that is not on the device
    unused           what an update does with parameters that a rank has not used (unused.py)
    checksums        keep a checksum of the gradients of each rank
    frozen_masters   frozen weights in 16 bits have fp32 masters, which a checkpoint keeps
    frozen_blocks    the format in which frozen weights of linear layers are kept; None: their dtype
    """

    param_groups: tuple[ParamGroup, ...]
    policy: ShardPolicy = STAGES[0]
    bucket_elements: int | None = None
    gather_elements: int | None = None
    overlap: bool = True
    grad_dtype: torch.dtype = torch.float32
    sent_dtype: torch.dtype | None = None
    sent_divisor: float | None = 1.0
    exchange: Callable[["ZeroSettings", torch.device], GradientExchange] | None = None
    weight_blocks: "Blocks | None" = None
    gradient_blocks: "Blocks | None" = None
    clip_grad: float = 0.0
    make_scaler: Callable[[], LossScale] = LossScale
    persistence: int | None = None
    prefetch: int | None = None
    offload: OffloadSettings = OffloadSettings()
    unused: Rule = "same"
    checksums: bool = False
    frozen_masters: bool = True
    frozen_blocks: "Blocks | None" = None

    @classmethod
    def from_config(
        cls, config: RunConfig, param_groups: tuple[ParamGroup, ...] | None = None
    ) -> "ZeroSettings":
        """Return the settings of a configuration. Raises ConfigError for combinations that are not supported.

        param_groups: used instead of those of `--optimizer`
        """
        o = config.optimizer
        zero = config.zero
        added = config.added_weights
        # Collectives of a node are stage 3's alone.
        has_inner = zero.stage == 3 and zero.zero_hpz_partition_size > 1
        return cls(
            param_groups=param_groups_of(o) if param_groups is None else param_groups,
            policy=HIERARCHICAL if has_inner else STAGES[zero.stage],
            bucket_elements=zero.reduce_bucket_size,
            gather_elements=zero.allgather_bucket_size,
            overlap=zero.overlap_comm is not False,
            grad_dtype=getattr(torch, o.gradient_dtype),
            sent_dtype=_dtype(zero.sent_dtype),
            sent_divisor=zero.sent_divisor,
            weight_blocks=_sent(WEIGHT_BITS, zero, zero.zero_quantized_weights),
            gradient_blocks=_sent(GRADIENT_BITS, zero, zero.zero_quantized_gradients),
            clip_grad=o.clip_grad,
            make_scaler=partial(make_scaler, o),
            persistence=zero.param_persistence_threshold,
            prefetch=zero.prefetch_bucket_size,
            offload=OffloadSettings.from_config(zero),
            checksums=wants_checksums(config),
            frozen_masters=added is None,
            frozen_blocks=_frozen(None if added is None else added.frozen_bits),
        )

    def __post_init__(self):
        self._check_update_rule()
        if self.checksums and self.update_rule != SUMMED:
            raise ConfigError(
                "a step is computed again (--rerun-bad-steps) from its weights alone, but this optimizer counts "
                "every gradient in the state of its exchange. Use an optimizer that sums gradients, such as "
                "adam, or leave --rerun-bad-steps out."
            )
        # Quantization needs the collectives of the stages that split weights and gradients.
        if self.weight_blocks and (
            self.policy.parameter is None or self.offload.parameters != "device"
        ):
            raise ConfigError(
                "quantized weights are those that ZeRO stage 3 splits and gathers from the "
                "device. Use --zero-stage 3 without --offload-param, or leave "
                "--zero-quantized-weights out."
            )
        if self.gradient_blocks and self.policy.gradient is None:
            raise ConfigError(
                "quantized gradients are exchanged as shards, which ZeRO stages 2 and 3 make. "
                "Use --zero-stage 2 or 3, or leave --zero-quantized-gradients out."
            )
        # Optimizers that need whole tensors or norms, where only parts are at hand.
        for group in self.param_groups:
            if group.traits.needs_whole_tensors and self.policy.parameter is not None:
                raise ConfigError(
                    f"the optimizer of parameter group {group.name!r} needs whole tensors, but ZeRO stage 3 "
                    "splits every parameter over all ranks and gathers it for its layer only. Use "
                    "--zero-stage 0, 1 or 2, or an optimizer that treats elements one by one, such as adam."
                )
            needs_all = (
                group.traits.needs_whole_tensors
                or group.traits.is_collective
                and not group.traits.steps_in_halves
            )
            if needs_all and self.offload.optimizer != "device":
                raise ConfigError(
                    f"the optimizer of parameter group {group.name!r} needs whole tensors or norms of them, "
                    "but offloaded state is updated in parts, one after the other. Use --offload-optimizer "
                    "none, or an optimizer that treats elements one by one, such as adam."
                )

    @property
    def update_rule(self) -> UpdateRule:
        """What ranks exchange, and keep for it; the same for all parameter groups."""
        declared = (group.traits.update_rule for group in self.param_groups)
        return next((rule for rule in declared if rule is not None), SUMMED)

    def _check_update_rule(self) -> None:
        rules = [
            (group.name, group.traits.update_rule or SUMMED)
            for group in self.param_groups
        ]
        for name, rule in rules:
            if rule != rules[0][1]:
                raise ConfigError(
                    f"parameter groups {rules[0][0]!r} and {name!r} have optimizers that exchange different "
                    "things in place of gradients, at different steps. Use one optimizer for all parameters."
                )
        self.update_rule.check(
            gradients_are_split=self.policy.gradient is not None
            or self.offload.optimizer != DEVICE,
            state_is_split=self.policy.optimizer is not None,
        )

    @property
    def align(self) -> int:
        """Elements of which slots and shards have a multiple: so that blocks cross no border."""
        return math.lcm(
            ALIGN,
            *(
                b.length
                for b in (self.weight_blocks, self.gradient_blocks, self.frozen_blocks)
                if b
            ),
        )

    def elements_of_bucket(self, num_parameters: int, ranks: int) -> int:
        """Return the size of a bucket that `ranks` reduce: small enough that most of the reduction is hidden behind
        backward.

        A shard of a bucket is contiguous, so a bucket is also what one all-gather of weights moves.
        """
        largest = max(LARGEST_BUCKET, RANK_PIECE * ranks)
        reduced = self.bucket_elements or min(
            max(num_parameters // 8, SMALLEST_BUCKET), largest
        )
        return min(reduced, self.gather_elements or reduced)

    def make_exchange(self, device: torch.device) -> GradientExchange:
        """Return the strategy that sums gradients over the ranks."""
        if self.exchange is not None:
            return self.exchange(self, device)
        if self.gradient_blocks is not None:
            from .quantized_exchange import QuantizedExchange

            first = replace(self.gradient_blocks, bits=FIRST_HOP_BITS)
            return QuantizedExchange(self.gradient_blocks, first, device)
        return self.update_rule.exchange(
            self.grad_dtype, device, self.sent_dtype, self.sent_divisor
        )


# Formats of numbers are loaded by the runs that have them.
def _sent(bits: int, zero: ZeroConfig, is_on: bool) -> "Blocks | None":
    """Return the format of what is sent in codes."""
    if not is_on:
        return None
    from .number_blocks import Blocks

    return Blocks(bits, zero.zero_quantization_block)


def _frozen(bits: int | None) -> "Blocks | None":
    """Return the format of frozen weights that are kept in codes."""
    if bits is None:
        return None
    from .number_blocks import FROZEN_BLOCKS

    return FROZEN_BLOCKS[bits]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
