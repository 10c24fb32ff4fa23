"""`ScanMixer`: what gated delta nets and Mamba-2 have in common, a mixer of tokens with a state of constant size.

    x → in_proj → z, channels, gates → convolution of the channels → scan → norm and gate z → out_proj

Heads that share keys are a group, and everything but the two projections works on each group by itself:

    rows of in_proj    | z  channels  gates | z  channels  gates | ...
                       |----- group 0 ------|----- group 1 ------|

Tensor-parallel ranks hold whole groups. Convolution and scan go through all tokens of a sequence, so under context
parallelism each rank exchanges its tokens for some groups of all tokens (`context_parallel/head_exchange.py`).

Letters: s positions, b samples, g groups and n heads of a tensor-parallel rank, c context-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...batch.batch import Batch
from ...batch.recurrence import States
from ...config.options.model import ModelConfig
from ...context_parallel.head_exchange import to_heads, to_tokens
from ...models.layer import LayerFlops, check_divides, recompute
from ...mpu.context import ParallelContext, new_parameter
from ...mpu.managed_parameter import ManagedParameter
from ...mpu.param_spec import Init, Matrices, ParamSpec, Split
from ...tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from . import fla_scan  # noqa: F401, registers an implementation of the scan
from .causal_conv import causal_conv, last_tokens
from .first_values import log_of_factor, softplus_of_step, within
from .linear_scan import linear_scan, scan_products
from .scan_states import scan_step, scan_with_states

HEADS = (Split("tp", 0),)
Scan = Callable[..., torch.Tensor]
"""Takes q, k, v, decay and beta of `linear_scan`, and returns o."""


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a mixer.

    groups     of heads that share keys
    heads      of each group
    key_dim    channels of a key, and of a query
    value_dim  channels of a value
    channels   parts of a group that the convolution takes, in their order
    gates      numbers for each head, of each token
    taps       tokens that the convolution sees
    has_rule   whether the scan has the delta rule
    """

    groups: int
    heads: int
    key_dim: int
    value_dim: int
    channels: tuple[int, ...]
    gates: int
    taps: int
    has_rule: bool = False

    @property
    def width(self) -> int:
        """Channels of the values of a group."""
        return self.heads * self.value_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of the first projection, of a group."""
        return (self.width, *self.channels, *(self.heads,) * self.gates)

    def linear_layers(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the projections: channels into and out of each."""
        rows = self.groups * sum(self.parts)
        return {
            "in_proj": (hidden, rows),
            "out_proj": (self.groups * self.width, hidden),
        }

    def flops(self, hidden: int, s: int) -> LayerFlops:
        """Return the FLOPs of a sequence of s tokens: projections, and the products of the scan."""
        rows = self.groups * (sum(self.parts) + self.width)
        heads = self.groups * self.heads
        products = scan_products(
            s, self.groups, heads, self.key_dim, self.value_dim, self.has_rule
        )
        return LayerFlops(6.0 * s * hidden * rows, 3 * sum(p.flops for p in products))


class ScanMixer(nn.Module):
    """x [s(/t), b, h] → the same shape. A subclass has the scan, and what becomes of its result.

    recompute_core  compute convolution and scan again in backward instead of keeping what they need
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        ctx: ParallelContext,
        sizes: MixerSizes,
        *,
        noun: str,
        conv_bias: bool,
        output_std: float,
    ):
        """name: global. noun: the option that sets the number of groups, for messages."""
        super().__init__()
        self.name = name
        self.ctx = ctx
        self.sizes = sizes
        self.eps = config.norm_epsilon
        self.recompute_core = False
        self.groups = check_divides(
            noun, sizes.groups, ctx.tp, "each rank holds whole groups of heads"
        )
        # From the hidden state to all parts of each group.
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sizes.groups * sum(sizes.parts),
            ctx,
            name=f"{name}.in_proj",
            init_std=config.init_method_std,
            bias=config.add_bias_linear,
        )
        weight = self.in_proj.weight
        weight.spec = replace(weight.spec, matrices=Matrices(sizes.groups, sizes.parts))
        # What mixes the tokens, and the way back.
        self._make_state(conv_bias)
        self.make_norm()
        self.out_proj = RowParallelLinear(
            sizes.groups * sizes.width,
            config.hidden_size,
            ctx,
            name=f"{name}.out_proj",
            init_std=output_std,
            bias=config.add_bias_linear,
        )

    def _make_state(self, conv_bias: bool) -> None:
        """Make the weights of the convolution and of the state."""
        sizes = self.sizes
        # The convolution of each channel, in the rows' order.
        channels = sizes.groups * sum(sizes.channels)
        bound = sizes.taps**-0.5
        self.conv_weight = self.parameter(
            "conv1d.weight", (channels, sizes.taps), within(-bound, bound), decay=True
        )
        self.conv_bias: ManagedParameter | None = None
        if conv_bias:
            self.conv_bias = self.parameter(
                "conv1d.bias", (channels,), within(-bound, bound)
            )
        # The factor of the state: exp(-exp(A_log) · softplus(gate + dt_bias)), in fp32 in any model.
        heads = sizes.groups * sizes.heads
        wide = torch.float32
        self.A_log = self.parameter("A_log", (heads,), log_of_factor(), dtype=wide)
        self.dt_bias = self.parameter(
            "dt_bias", (heads,), softplus_of_step(), dtype=wide
        )

    def parameter(
        self,
        leaf: str,
        shape: tuple[int, ...],
        init: Init,
        *,
        splits: tuple[Split, ...] = HEADS,
        partial_over: tuple[str, ...] = (),
        decay: bool = False,
        dtype: torch.dtype | None = None,
    ) -> ManagedParameter:
        """Return this rank's shard of a parameter, by default of its groups and in the model's dtype."""
        spec = ParamSpec(
            f"{self.name}.{leaf}",
            shape,
            init,
            splits=splits,
            partial_over=partial_over,
            decay=decay,
        )
        ctx = self.ctx
        return new_parameter(
            spec,
            sizes={"tp": ctx.tp.size},
            dtype=dtype or ctx.dtype,
            device=ctx.device,
        )

    def make_norm(self) -> None:
        """Make the weights that a subclass has besides."""

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mix the tokens of x, of each document by itself. Collective over tp and cp."""
        sizes = self.sizes
        parts = self.projected(x)
        z, packed = parts.split((sizes.width, parts.shape[-1] - sizes.width), -1)
        # Texts that are generated have no backward.
        repeats = self.recompute_core and batch.past is None
        run = partial(recompute, self.mixed) if repeats else self.mixed
        out = run(packed, batch)
        gated = self.gated(out, z.unflatten(-1, (sizes.heads, -1)).flatten(2, 3))
        return self.out_proj(gated.to(x.dtype).flatten(2))

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the parts of each group of the rank, [s, b, g, parts]."""
        return self.in_proj(x).unflatten(-1, (self.groups, -1))

    def mixed(self, packed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Convolve and scan: packed [s/c, b, g, channels and gates] → [s/c, b, n, dv] of the rank's tokens."""
        cp = self.ctx.cp
        if batch.past is not None:
            return batch.past.recur(self.name, self, packed, batch)
        if cp.size == 1:
            return self.of_groups(packed, batch.document_ids, range(self.groups))
        whole = batch.whole
        assert whole is not None, "context-parallel ranks have parts of a batch"
        # Some groups of all tokens, and back.
        order = self.ctx.slice.order(whole.seq_length, packed.device)
        (packed,) = to_heads((packed,), cp, order)
        first = cp.rank * packed.shape[2]
        groups = range(first, first + packed.shape[2])
        out = self.of_groups(packed, whole.document_ids, groups)
        return to_tokens(out.contiguous(), cp, order)

    def of_groups(
        self, packed: torch.Tensor, documents: torch.Tensor | None, groups: range
    ) -> torch.Tensor:
        """Convolve and scan these of the rank's groups: packed [s, b, groups, ..] → [s, b, heads, dv]."""
        channels, gates = self._channels_and_gates(packed)
        convolved = self.convolved(channels, documents, groups)
        return self.scanned(
            self._parts(convolved, groups),
            gates,
            groups,
            lambda *inputs: linear_scan(*inputs, documents),
        )

    def _channels_and_gates(
        self, packed: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the channels of packed [s, b, groups, ..], [s, b, channels], and each gate, [s, b, heads]."""
        sizes = self.sizes
        gates = sizes.gates * sizes.heads
        channels, gate = packed.split((packed.shape[-1] - gates, gates), -1)
        return channels.flatten(2), [n.flatten(2) for n in gate.split(sizes.heads, -1)]

    def _parts(self, channels: torch.Tensor, groups: range) -> tuple[torch.Tensor, ...]:
        """Return the parts of the channels, each [s, b, groups, ..]."""
        return channels.unflatten(-1, (len(groups), -1)).split(self.sizes.channels, -1)

    def convolved(
        self, channels: torch.Tensor, documents: torch.Tensor | None, groups: range
    ) -> torch.Tensor:
        """Convolve the channels of these groups, [s, b, channels]."""
        width = sum(self.sizes.channels)
        bias = self.conv_bias
        return causal_conv(
            channels,
            _rows(self.conv_weight, groups, width),
            None if bias is None else _rows(bias, groups, width),
            documents,
        )

    def begin(
        self, x: torch.Tensor, batch: Batch, ends: torch.Tensor
    ) -> tuple[torch.Tensor, States]:
        """Read texts from their beginnings (`batch.recurrence.Recurrence`). States: the channels of the tokens that the
        convolution of the next one sees, [texts, taps - 1, channels], and those of the scan, [texts, n, dk, dv]."""
        documents = batch.document_ids
        channels, gates = self._channels_and_gates(x)
        window = last_tokens(channels[:, 0], ends, self.sizes.taps - 1, documents)
        found: list[torch.Tensor] = []

        def scan(*inputs: Any) -> torch.Tensor:
            out, states = scan_with_states(inputs, documents, ends)
            found.append(states)
            return out

        groups = range(self.groups)
        convolved = self.convolved(channels, documents, groups)
        out = self.scanned(self._parts(convolved, groups), gates, groups, scan)
        return out, (window, *found)

    def proceed(self, x: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """Read a token of each text after its states (`batch.recurrence.Recurrence`)."""
        before, state = states
        channels, gates = self._channels_and_gates(x)
        # [taps, texts, channels], of which the last token is convolved.
        window = torch.cat((before.transpose(0, 1), channels))
        groups = range(self.groups)
        convolved = self.convolved(window, None, groups)[-1:]
        found: list[torch.Tensor] = []

        def scan(*inputs: Any) -> torch.Tensor:
            token = [i if i is None else i[0] for i in inputs]
            out, after = scan_step(token, state)
            found.append(after)
            return out[None]

        out = self.scanned(self._parts(convolved, groups), gates, groups, scan)
        return out, (window[1:].transpose(0, 1), *found)

    def scanned(
        self,
        parts: tuple[torch.Tensor, ...],
        gates: list[torch.Tensor],
        groups: range,
        scan: Scan,
    ) -> torch.Tensor:
        """Scan. parts: of the channels, each [s, b, groups, ..]; gates: each [s, b, heads] → [s, b, heads, dv]."""
        raise NotImplementedError

    def gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the norm of the result, gated by z; all [s, b, n, dv]."""
        raise NotImplementedError

    def steps(self, gate: torch.Tensor, groups: range) -> torch.Tensor:
        """Return softplus(gate + dt_bias), fp32 [s, b, heads] of these groups."""
        bias = self.of_heads(self.dt_bias, groups)
        return torch.nn.functional.softplus(gate.float() + bias)

    def decay(self, steps: torch.Tensor, groups: range) -> torch.Tensor:
        """Return the logarithms of the factors of the state, fp32 [s, b, heads]."""
        return -self.of_heads(self.A_log, groups).exp() * steps

    def of_heads(self, parameter: torch.Tensor, groups: range) -> torch.Tensor:
        """Return the elements [n] of a parameter that belong to the heads of these groups."""
        return _rows(parameter, groups, self.sizes.heads)


def _rows(parameter: torch.Tensor, groups: range, each: int) -> torch.Tensor:
    """Return the rows of these groups, of which each has so many."""
    return parameter[groups.start * each : groups.stop * each]
