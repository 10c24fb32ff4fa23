"""Attention to some of the keys at a time: output and log-sum-exp, merged into those of all keys.

    forward    of each tile (O', l');   l = log Σ exp l',   O = Σ exp(l' - l) O'
    backward   of each tile, from the final l and D = rowsum(dO ∘ O):
               P = exp(scale q kᵀ - l),  dv = Pᵀ dO,  dS = P ∘ (dO vᵀ - D),
               dq = scale dS k,  dk = scale dSᵀ q

With a cap c, c tanh(scale q kᵀ / c) replaces scale q kᵀ, and dS is multiplied by 1 - tanh².

Sums over tiles are fp32. With dropout, O' and dv have P ∘ keep in place of P, and dO vᵀ is multiplied by
keep. Formulas: Dao et al. 2022 (arXiv:2205.14135), appendix B; merging: Liu et al. 2023 (arXiv:2310.01889).

Implementations of a tile: the compiled kernel where core attention has it; else torch's fused attention of CPUs and
of GPUs, whose backward takes the output and the log-sum-exp of all keys: on GPUs FlashAttention for tiles without
a bias, if the wing of kernels is installed, else the memory-efficient kernel; elementary operations with dropout
or a cap.

Letters: q and k rows, b samples, n query heads, g key-value heads (g divides n), d channels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..features import Provided
from .attention_kernel import OfRows, ScoreBlock, attention_kernel, row_dots
from .attention_tiles import Runs, Tile, run_tiles, tiles
from .core_attention import attention
from .head_widths import alike, narrowed
from .key_visibility import KeyVisibility
from .row_sums import finite, merge_, with_empty_rows
from .scoring import PLAIN, Scoring
from .work import CallWork, bytes_of, report

ATTENTION_TILES: Provided[Any] = Provided("attention tiles")

ALIGNED = 16  # columns of a bias in memory are a multiple of it, as torch pads them
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_GPU = torch.ops.aten._scaled_dot_product_efficient_attention
_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


# (bool [b, n, rows, columns], scale of kept probabilities) of a tile
Keep = Callable[[Tile], tuple[torch.Tensor, float]]


class PartialAttention:
    """Output and log-sum-exp of queries over the keys that were added so far.

    queries [q, b, n, d]; positions: theirs; visible: which keys they see; keep: what dropout keeps of a tile

    value_width: channels of a value, if it is not the d of a query and a key
    """

    def __init__(
        self,
        queries: torch.Tensor,
        positions: Runs,
        visible: KeyVisibility,
        scoring: Scoring = PLAIN,
        keep: Keep | None = None,
        value_width: int | None = None,
    ):
        self.work = _Work(_heads(queries), positions, visible, scoring, keep)
        q, b, n, d = queries.shape
        # The sums over tiles are as wide as values.
        width = d if value_width is None else value_width
        # [b, n, q, d], in the memory order of the result, which is then no copy
        self.out = _heads(queries.new_zeros(q, b, n, width, dtype=torch.float32))
        self.sums = queries.new_full((b, n, q), -math.inf, dtype=torch.float32)
        if scoring.sink is not None:
            # a key of that score, whose value is zero
            self.sums.copy_(scoring.sink[:, None])

    def add(self, keys: torch.Tensor, values: torch.Tensor, positions: Runs) -> None:
        """Attend to a block of keys and values [k, b, g, d], each key in one block only."""
        for tile, operands in self.work.tiles(keys, values, positions):
            out, sums = operands.kernel.forward(operands)
            merge_(self.out[:, :, tile.rows], self.sums[:, :, tile.rows], out, sums)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [q, b, n * d] in the dtype of the queries, 0 where a query sees no key; and the log-sum-exp
        fp32 [b, n, q]."""
        out = self.out.to(self.work.queries.dtype)
        return out.permute(2, 0, 1, 3).flatten(2), self.sums


class PartialGradients:
    """Gradients of `PartialAttention`, block of keys by block of keys.

    result   what `PartialAttention.result` returned after all keys
    dout     [q, b, n * d]
    """

    def __init__(
        self,
        queries: torch.Tensor,
        positions: Runs,
        visible: KeyVisibility,
        scoring: Scoring,
        result: tuple[torch.Tensor, torch.Tensor],
        dout: torch.Tensor,
        keep: Keep | None = None,
    ):
        self.work = _Work(_heads(queries), positions, visible, scoring, keep)
        # The width of the output is that of the values.
        of_heads = (*queries.shape[:3], -1)
        self.out, self.dout = (_heads(t.view(of_heads)) for t in (result[0], dout))
        self.sums = finite(result[1])
        self._dots: torch.Tensor | None = None
        self.dq = torch.zeros_like(queries, dtype=torch.float32)  # [q, b, n, d]

    def of_sink(self, sink: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sink [n]: -Σ exp(sink - l) D over the rows."""
        dots = (
            self._dots
            if self._dots is not None
            else (self.dout.float() * self.out).sum(-1)
        )  # [b, n, q]
        return (
            -((sink.float()[:, None] - self.sums).exp() * dots)
            .sum((0, 2))
            .to(sink.dtype)
        )

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: Runs,
        dkv: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        """Add the gradients of a block of keys and values [k, b, g, d] to the two of `dkv`, fp32 of their shapes."""
        totals = _heads(self.dq), _heads(dkv[0]), _heads(dkv[1])
        if self.work.has_kernel(positions, values) and self._dots is None:
            self._dots = row_dots(_rows(self.dout), _rows(self.out))
        for tile, operands in self.work.tiles(keys, values, positions):
            rows = (slice(None), slice(None), tile.rows)
            dots = None if self._dots is None else self._dots[rows]
            final = _Final(self.dout[rows], self.out[rows], self.sums[rows], dots)
            places = zip(totals, (tile.rows, tile.columns, tile.columns), strict=True)
            operands.kernel.backward(
                operands, final, [total[:, :, at] for total, at in places]
            )


@dataclass(frozen=True, eq=False)
class _Work:
    """Queries [b, n, q, d] at their positions, and how they attend."""

    queries: torch.Tensor
    positions: Runs
    visible: KeyVisibility
    scoring: Scoring
    keep: Keep | None

    def has_kernel(self, keys: Runs, values: torch.Tensor) -> bool:
        """Return whether the compiled kernel takes the queries and keys of these positions: positions and documents
        of keys then determine all that is hidden and added, and there is neither dropout nor a cap. Values [..] must
        be as wide as queries."""
        if self.keep is not None or self.scoring.has_places:
            return False
        if self.queries.shape[-1] != values.shape[-1]:
            return False
        if self.scoring.cap is not None:
            return False
        if self.queries.device.type != "cpu" or not self.visible.hides_by_key:
            return False
        if not attention.has("c++", "cpu", self.queries.dtype):
            return False
        runs = (*self.positions.ranges, *keys.ranges)
        return _compiled().takes(self.queries, self.visible.pattern, runs)

    def tiles(
        self, keys: torch.Tensor, values: torch.Tensor, positions: Runs
    ) -> Iterator[tuple[Tile, "_Operands"]]:
        """Yield the tiles of a block of keys and values [k, b, g, d], and their tensors."""
        keys = _heads(keys)
        values = _heads(values)
        # The compiled kernel takes the pattern itself.
        if self.has_kernel(positions, values):
            for tile in run_tiles(self.visible, self.positions, positions):
                block = ScoreBlock(self.visible, tile.queries, tile.keys)
                yield tile, replace(self._cut(tile, keys, values), block=block)
            return
        # Others take numbers that are added to the scores.
        extras = self.keep, self.scoring.alibi, self.scoring.cap
        has_bias = any(extra is not None for extra in extras)
        for tile in tiles(self.visible, self.positions, positions, has_bias):
            yield (
                tile,
                replace(
                    self._cut(tile, keys, values),
                    bias=self._bias(tile),
                    triangle=tile.is_triangle,
                    keep=None if self.keep is None else self.keep(tile),
                ),
            )

    def _cut(self, tile: Tile, keys: torch.Tensor, values: torch.Tensor) -> "_Operands":
        return _Operands(
            self.queries[:, :, tile.rows],
            keys[:, :, tile.columns],
            values[:, :, tile.columns],
            self.scoring,
        )

    def _bias(self, tile: Tile) -> torch.Tensor | None:
        """Return what is added to the scores of a tile, so that hidden keys have no probability."""
        hidden = None
        falling = None
        if not (tile.is_whole or tile.is_triangle):
            hidden = self.visible.hidden(tile.queries, tile.keys, self.queries.device)
        if self.scoring.alibi is not None:
            falling = self.scoring.alibi.bias(tile.queries, tile.keys)
        return _bias(hidden, falling, self.queries.dtype)


@dataclass(frozen=True)
class _Operands:
    """The tensors of one tile: q [b, n, rows, d], k and v [b, g, columns, d].

    bias      [b or 1, n or 1, rows, columns] to be added to the scores, -inf where hidden; None
    triangle  a causal mask of the tile itself is added
    keep      (bool [b, n, rows, columns], scale of kept probabilities); None without dropout
    block     what the compiled kernel is to compute, in place of a bias; None: another kernel
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scoring: Scoring
    bias: torch.Tensor | None = None
    triangle: bool = False
    keep: tuple[torch.Tensor, float] | None = None
    block: ScoreBlock | None = None

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys."""
        return self.scoring.scale_of(self.q.shape[-1])

    @property
    def bias_of_heads(self) -> torch.Tensor | None:
        """The bias [b, n, rows, columns], a view."""
        if self.bias is None:
            return None
        samples, heads = self.q.shape[:2]
        return self.bias.expand(samples, heads, -1, -1)

    @property
    def kernel(self) -> "_Kernel":
        # What the compiled kernel takes is known before a tile is cut: one width, no dropout and no cap, and keys
        # that are hidden by their positions and documents alone.
        if self.block is not None:
            return _COMPILED
        # Fused kernels neither drop probabilities nor bound scores.
        if self.keep is not None or self.scoring.cap is not None:
            return _ELEMENTARY
        if self.q.device.type in ("cpu", "meta"):
            return _ON_CPU
        flash = flash_tiles()
        # FlashAttention takes values as wide as keys, and adds no bias; the memory-efficient kernel takes both
        # widths of its own.
        alike = self.q.shape[-1] == self.v.shape[-1]
        if alike and self.bias is None and flash is not None and flash.suits(self.q):
            return _FLASH
        return _ON_GPU

    def spread(self, t: torch.Tensor) -> torch.Tensor:
        """[b, g, columns, d] → [b, n, columns, d]: each query head has its keys."""
        heads = self.q.shape[1]
        return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)

    def joined(self, t: torch.Tensor) -> torch.Tensor:
        """[b, n, columns, d] → [b, g, columns, d], sums over the query heads of a group."""
        groups = self.k.shape[1]
        return t if t.shape[1] == groups else t.unflatten(1, (groups, -1)).sum(2)


class _Final(NamedTuple):
    """Tensors of the rows of a tile, over all keys.

    dout, out  [b, n, rows, d]
    sums       log-sum-exp fp32 [b, n, rows]
    dots       D [b, n, rows], for the compiled kernel
    """

    dout: torch.Tensor
    out: torch.Tensor
    sums: torch.Tensor
    dots: torch.Tensor | None = None


class _Kernel(NamedTuple):
    """forward   of a tile → out [b, n, rows, d], and the log-sum-exp fp32 [b, n, rows]
    backward  adds dq, dk and dv of the tile to fp32 tensors
    """

    forward: Callable[[_Operands], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[_Operands, _Final, Sequence[torch.Tensor]], None]


def _cpu_forward(t: _Operands) -> tuple[torch.Tensor, torch.Tensor]:
    # torch's kernel of CPUs takes one width, so that the narrower tensors have zeros behind their channels, which
    # changes no score.
    out, sums = _CPU(
        *alike(t.q, t.k, t.v),
        0.0,
        t.triangle,
        attn_mask=t.bias,
        scale=t.scale,
    )
    (out,) = narrowed((out,), (t.v,))
    return out, with_empty_rows(sums, t.bias)


def _cpu_backward(t: _Operands, final: _Final) -> list[torch.Tensor]:
    # Gradients of the zeros are left out.
    found = _CPU_BACKWARD(
        *alike(final.dout, t.q, t.k, t.v, final.out),
        final.sums,
        0.0,
        t.triangle,
        attn_mask=t.bias,
        scale=t.scale,
    )
    return narrowed(found, (t.q, t.k, t.v))


def _gpu_forward(t: _Operands) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums, *_ = _GPU(
        t.q,
        t.spread(t.k),
        t.spread(t.v),
        t.bias_of_heads,
        True,  # returns the sums
        0.0,
        t.triangle,
        scale=t.scale,
    )
    # torch pads the rows.
    sums = sums[:, :, : t.q.shape[2]]
    return out, with_empty_rows(sums, t.bias)


def _gpu_backward(
    t: _Operands, final: _Final
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = F.pad(final.sums, (0, -final.sums.shape[2] % 32))
    unused = torch.zeros(
        (), dtype=torch.int64, device=t.q.device
    )  # the state of a dropout
    dq, dk, dv, _ = _GPU_BACKWARD(
        final.dout,
        t.q,
        t.spread(t.k),
        t.spread(t.v),
        t.bias_of_heads,
        final.out,
        sums,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        t.triangle,
        scale=t.scale,
    )
    return dq, t.joined(dk), t.joined(dv)


@cache
def flash_tiles() -> ModuleType | None:
    """FlashAttention of GPUs, with `suits`, `forward` and `backward` of tiles; None without the wing of kernels."""
    return ATTENTION_TILES.find()


def _flash_forward(t: _Operands) -> tuple[torch.Tensor, torch.Tensor]:
    return _flash().forward(t.q, t.k, t.v, t.triangle, t.scale)


def _flash_backward(
    t: _Operands, final: _Final
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _flash().FinalRows(final.dout, final.out, final.sums)
    return _flash().backward(t.q, t.k, t.v, rows, t.triangle, t.scale)


def _flash() -> ModuleType:
    found = flash_tiles()
    assert found is not None, "the tile was chosen for it"
    return found


def _compiled() -> ModuleType:
    found = attention_kernel()
    assert found is not None, "attention has the implementation of the wing of kernels"
    return found


def _compiled_work(t: _Operands) -> CallWork:
    """Return the work of the compiled kernel for one tile: it computes what is seen."""
    block = t.block
    assert block is not None, "the tile was chosen for the compiled kernel"
    pattern = block.visible.pattern
    seen = pattern.pairs_between(block.queries, block.keys)
    samples, heads, _, width = t.q.shape
    # Products of queries and keys, and of probabilities and values.
    widths = width + t.v.shape[3]
    flops = 2.0 * samples * heads * seen * widths
    # The result is as large as the queries.
    moved = (t.q, t.k, t.v, t.q)
    return CallWork(
        scores=flops,
        nbytes=sum(map(bytes_of, moved)),
        dtype=t.q.dtype,
    )


def _compiled_forward(t: _Operands) -> tuple[torch.Tensor, torch.Tensor]:
    report("attention tile", "c++", _compiled_work(t))
    tensors = map(_rows, (t.q, t.k, t.v))
    out, sums = _compiled().attend(*tensors, t.block, _without_sink(t))
    return _heads(out), sums.masked_fill_(sums == math.inf, -math.inf)


def _compiled_backward(
    t: _Operands, final: _Final, totals: Sequence[torch.Tensor]
) -> None:
    assert final.dots is not None, "they are computed for the compiled kernel"
    report("attention tile backward", "c++", _compiled_work(t).times(2))
    _compiled().add_gradients_(
        [_rows(total) for total in totals],
        *map(_rows, (t.q, t.k, t.v, final.dout)),
        OfRows(final.sums, final.dots),
        t.block,
        _without_sink(t),
    )


def _without_sink(t: _Operands) -> Scoring:
    """The sink is no key of a tile: it is in the sums that tiles are merged into."""
    return replace(t.scoring, sink=None)


def _elementary_forward(t: _Operands) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _biased(_scores(t), t.bias)
    sums = scores.logsumexp(-1)
    p = (scores - finite(sums)[..., None]).exp()
    values = t.spread(t.v.float())
    return _kept(t, p) @ values, sums


def _elementary_backward(
    t: _Operands, final: _Final
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Products in fp32, with the keys and values of each query head.
    dout = final.dout.float()
    keys = t.spread(t.k.float())
    values = t.spread(t.v.float())
    # The probabilities, from the sums over all keys.
    scores = _scores(t)
    p = (_biased(scores, t.bias) - final.sums[..., None]).exp()
    dp = _kept(t, dout @ values.transpose(-1, -2))
    dots = (dout * final.out.float()).sum(-1, keepdim=True)
    ds = p * (dp - dots) * t.scale
    if (cap := t.scoring.cap) is not None:
        ds *= 1 - (scores / cap).square()
    # The gradients of the three factors.
    dq = ds @ keys
    dk = ds.transpose(-1, -2) @ t.q.float()
    dv = _kept(t, p).transpose(-1, -2) @ dout
    return dq, t.joined(dk), t.joined(dv)


def _adding(backward: Callable) -> Callable:
    """Return the backward of a `_Kernel` from one that returns dq, dk and dv."""

    def add(t: _Operands, final: _Final, totals: Sequence[torch.Tensor]) -> None:
        for total, part in zip(totals, backward(t, final), strict=True):
            total += part

    return add


_ON_CPU = _Kernel(
    _cpu_forward, _adding(_cpu_backward)
)  # also of tensors without memory
_COMPILED = _Kernel(
    _compiled_forward, _compiled_backward
)  # of a CPU with AVX-512 or AVX2
_ON_GPU = _Kernel(_gpu_forward, _adding(_gpu_backward))
_FLASH = _Kernel(_flash_forward, _adding(_flash_backward))  # of a GPU, without a bias
_ELEMENTARY = _Kernel(_elementary_forward, _adding(_elementary_backward))


def _bias(
    hidden: torch.Tensor | None, falling: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """[b or 1, n or 1, rows, columns]: -inf where hidden, else what falls with distance, or 0.

    Memory has a multiple of ALIGNED columns, because torch's attention of GPUs refuses a bias whose rows are
    not aligned to 16 bytes. scaled_dot_product_attention pads it; the operation called here does not.
    """
    parts = [t for t in (hidden, falling) if t is not None]
    if not parts:
        return None
    *shape, columns = torch.broadcast_shapes(*(t.shape for t in parts))
    bias = parts[0].new_zeros(*shape, -(-columns // ALIGNED) * ALIGNED, dtype=dtype)[
        ..., :columns
    ]
    if falling is not None:
        bias.copy_(falling)
    return bias if hidden is None else bias.masked_fill_(hidden, -math.inf)


def _scores(t: _Operands) -> torch.Tensor:
    """fp32 [b, n, rows, columns], without the bias."""
    queries = t.q.float() * t.scale
    keys = t.spread(t.k.float())
    return t.scoring.capped(queries @ keys.transpose(-1, -2))


def _biased(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return scores if bias is None else scores + bias


def _kept(t: _Operands, p: torch.Tensor) -> torch.Tensor:
    if t.keep is None:
        return p
    mask, factor = t.keep
    return p * mask * factor


def _heads(t: torch.Tensor) -> torch.Tensor:
    """[s, b, n, d] → [b, n, s, d], a view."""
    return t.permute(1, 2, 0, 3)


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] → [s, b, n, d], a view."""
    return t.permute(2, 0, 1, 3)
